"""``POST /api/v1/policy/reload``: look at the policy file again."""

from __future__ import annotations

from aiohttp import web

from extproc.admin.context import ADMIN, problem
from extproc.errors import PolicyError


async def _reload(request: web.Request) -> web.Response:
    admin = request.app[ADMIN]
    try:
        result = await admin.reloader.reload()
    except PolicyError as error:
        return problem(422, str(error))
    return web.json_response({"result": result, "policy": admin.scheduler.policy.digest})


ROUTES = (web.post("/api/v1/policy/reload", _reload),)
