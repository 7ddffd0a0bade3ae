"""What each worker has cached: Bloom digests and the index over all of them."""
