"""A stand-in for the Hugging Face hub on loopback: the routes that huggingface_hub uses to download and to upload a model."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from shoal.net.http_server import Server, listen

COMMIT = "c" * 40


@dataclass
class HubServer:
    """Repositories in memory. `files` maps repository and path to content."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    lfs: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    private: set[str] = field(default_factory=set)
    url: str = ""

    # -- downloads ----------------------------------------------------------------------------------------

    async def info(self, request: Request) -> Response:
        repo = self._repo(request)
        if repo not in self.files:
            return JSONResponse(
                {"error": "Repository not found"}, 404, headers={"X-Error-Code": "RepoNotFound"}
            )
        if request.path_params.get("revision", "main") not in ("main", COMMIT):
            return JSONResponse({"error": "no revision"}, 404, headers={"X-Error-Code": "RevisionNotFound"})
        siblings = [{"rfilename": name} for name in self.files[repo]]
        return JSONResponse(
            {"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []}
        )

    async def tree(self, request: Request) -> Response:
        found = self.files.get(self._repo(request), {})
        return JSONResponse(
            [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in found.items()
            ]
        )

    async def resolve(self, request: Request) -> Response:
        data = self.files.get(self._repo(request), {}).get(request.path_params["path"])
        if data is None:
            return JSONResponse({"error": "no file"}, 404, headers={"X-Error-Code": "EntryNotFound"})
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(data)),
        }
        return Response(b"" if request.method == "HEAD" else data, headers=headers)

    # -- uploads ------------------------------------------------------------------------------------------

    async def create(self, request: Request) -> Response:
        wanted = await request.json()
        repo = "/".join(filter(None, (wanted.get("organization"), wanted["name"])))
        self.files.setdefault(repo, {})
        if wanted.get("private") or wanted.get("visibility") == "private":
            self.private.add(repo)
        return JSONResponse({"url": f"{self.url}/{repo}", "id": repo})

    async def check_card(self, request: Request) -> Response:
        return JSONResponse({"errors": [], "warnings": []})

    async def preupload(self, request: Request) -> Response:
        wanted = (await request.json())["files"]
        return JSONResponse(
            {
                "files": [
                    {
                        "path": one["path"],
                        "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                        "shouldIgnore": False,
                    }
                    for one in wanted
                ]
            }
        )

    async def lfs_batch(self, request: Request) -> Response:
        wanted = await request.json()
        objects = [
            {
                "oid": one["oid"],
                "size": one["size"],
                "authenticated": True,
                "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}", "header": {}}},
            }
            for one in wanted["objects"]
        ]
        return JSONResponse(
            {"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json"
        )

    async def lfs_put(self, request: Request) -> Response:
        self.lfs[request.path_params["oid"]] = await request.body()
        return Response(b"")

    async def commit(self, request: Request) -> Response:
        repo = self._repo(request)
        for line in (await request.body()).splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[repo][value["path"]] = self.lfs[value["oid"]]
        address = f"{self.url}/{repo}/commit/{COMMIT}"
        return JSONResponse({"success": True, "commitOid": COMMIT, "commitUrl": address, "hookOutput": ""})

    async def other(self, request: Request) -> Response:
        self.asked.append(f"{request.method} {request.url.path}")
        return JSONResponse({"error": f"the stand-in has no {request.url.path}"}, 404)

    @staticmethod
    def _repo(request: Request) -> str:
        return f"{request.path_params['org']}/{request.path_params['name']}"

    def routes(self) -> list[Route]:
        """Returns the routes, the more specific ones first."""
        api = "/api/models/{org}/{name}"
        return [
            Route("/api/repos/create", self.create, methods=["POST"]),
            Route("/api/validate-yaml", self.check_card, methods=["POST"]),
            Route(api + "/preupload/{revision}", self.preupload, methods=["POST"]),
            Route(api + "/commit/{revision}", self.commit, methods=["POST"]),
            Route(api + "/tree/{revision}", self.tree),
            Route(api + "/revision/{revision}", self.info),
            Route(api, self.info),
            Route("/{org}/{name}.git/info/lfs/objects/batch", self.lfs_batch, methods=["POST"]),
            Route("/{org}/{name}/resolve/{revision}/{path:path}", self.resolve, methods=["GET", "HEAD"]),
            Route("/lfs/{oid}", self.lfs_put, methods=["PUT"]),
            Route("/{path:path}", self.other, methods=["GET", "HEAD", "POST", "PUT", "DELETE"]),
        ]


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serves an empty hub on a free port of loopback."""
    hub = HubServer()
    server = Server(Starlette(routes=hub.routes()), listen("127.0.0.1", 0))
    server.start()
    hub.url = f"http://127.0.0.1:{server.port}"
    try:
        yield hub
    finally:
        server.close()
