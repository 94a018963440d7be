# SPDX-License-Identifier: Apache-2.0
"""A Hub on this machine: models, datasets, tokens, gates, uploads. No redirects, ranges, xet or LFS."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN, STRANGER = "hf_insider", "hf_stranger"  # of an account that sees everything, and of one that sees what is public
API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.+))?)?$")
FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
WRITE = re.compile(r"/api/(?:models/([^/]+/[^/]+)/)?(repos/create|validate-yaml|preupload|commit)\b")


@dataclass(frozen=True)
class Repo:
    files: Mapping[str, bytes]
    gated: bool = False  # Its page is for all, its files are for those who were let in.
    private: bool = False

    @functools.cached_property
    def commit(self) -> str:
        """A name that changes with the files, as git's does."""
        return hashlib.sha1(b"".join(name.encode() + self.files[name] for name in sorted(self.files))).hexdigest()


@functools.cache
def etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their paths in it, as `HubServer.add` takes them."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class HubServer:
    """`with HubServer() as hub` serves what was added under `hub.url`, and records (method, path) of each request."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.commits: dict[str, Repo] = {}  # All that were added, also those that are no longer the newest.
        self.asked: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": self}))
        self.server.handle_error = lambda *_: None  # A client that hung up is no error.
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.server.serve_forever, args=[0.02], daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, files: Mapping[str, bytes], kind: str = "models", **access: bool) -> None:
        """A repository `org/name` of kind `models` or `datasets`; `access` is `gated` or `private`."""
        self.repos[kind, name] = repo = Repo(files, **access)
        self.commits[repo.commit] = repo

    def environ(self, home: Path) -> dict[str, str]:
        """Variables with which a process uses this Hub, and a cache of its own in `home`."""
        online = dict.fromkeys(["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"], "0")
        return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "no_proxy": "127.0.0.1"} | online

    def fetched(self) -> list[str]:
        """The files that were asked for by GET, in alphabetical order."""
        return sorted(match[4] for method, path in self.asked if method == "GET" and (match := FILE.match(path)))


class Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_write(match[1], match[2]) if (match := WRITE.match(self.path)) else self.do_GET()

    def do_write(self, name: str | None, action: str) -> None:
        """An upload's requests: every file comes inside its commit, none through LFS."""
        posted = list(map(json.loads, self.rfile.read(int(self.headers["Content-Length"])).splitlines()))
        self.hub.asked.append((self.command, self.path))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(403, "", "You have no write access")
        elif action == "repos/create":
            name = f"{posted[0]['organization']}/{posted[0]['name']}"
            self.hub.add(name, {}, private=posted[0].get("visibility") == "private")
            self.send_json({"url": f"{self.hub.url}/{name}", "name": name})
        elif action == "preupload":
            plan = {"uploadMode": "regular", "shouldIgnore": False}
            self.send_json({"files": [plan | {"path": file["path"]} for file in posted[0]["files"]]})
        elif action == "commit":
            files = [line["value"] for line in posted if line["key"] == "file"]
            repo = self.hub.repos["models", name]
            sent = {file["path"]: base64.b64decode(file["content"]) for file in files}
            self.hub.repos["models", name] = Repo({**repo.files, **sent}, private=repo.private)
            self.send_json({"commitUrl": f"{self.hub.url}/{name}/commit/0", "commitOid": "0"})
        else:
            self.send_json({})  # The card's metadata is fine.

    def do_GET(self) -> None:
        posted = parse_qs(self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode())
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        page, file = API.match(path), FILE.match(path)
        kind, name = (page[1], page[2]) if page else ("datasets" if file and file[1] else "models", file and file[2])
        repo, revision = self.hub.repos.get((kind, name)), (page and page[4]) or (file and file[3]) or "main"
        if repo and revision != "main":
            repo = self.hub.commits.get(revision, repo)
        if token not in ("", TOKEN, STRANGER):
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif path == "/api/whoami-v2":
            self.send_json({"type": "user", "name": "me"}) if token else self.refuse(401, "", "Who are you?")
        elif (repo is None or (repo.private and token != TOKEN)) and token:
            self.refuse(404, "RepoNotFound", "Repository not found")
        elif repo is None or (repo.private and token != TOKEN):  # The Hub does not tell whether a private one exists.
            self.refuse(401, "", "Invalid username or password.")
        elif revision not in ("main", *self.hub.commits):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif page and page[3] in ("tree", "paths-info"):
            folder = f"{page[5]}/" if page[5] else ""
            names = [name for name in posted.get("paths", repo.files) if name in repo.files and name.startswith(folder)]
            sizes = {name: {"size": len(repo.files[name]), "oid": etag(repo.files[name])} for name in names}
            files = [{"type": "file", "path": name} | size for name, size in sizes.items()]
            self.send_json(files) if files or not folder else self.refuse(404, "EntryNotFound", "Entry not found")
        elif page:
            self.send_json({"id": name, "sha": repo.commit, "siblings": [{"rfilename": name} for name in repo.files]})
        elif repo.gated and token != TOKEN:
            self.refuse(403 if token else 401, "GatedRepo", f"Access to {name} is restricted.")
        elif file[4] not in repo.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            self.send_file(repo, file[4])

    def refuse(self, status: int, code: str, message: str) -> None:
        self.send_json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

    def send_json(self, content: object, status: int = 200, headers: Mapping[str, str] = {}) -> None:
        body = json.dumps(content).encode()
        self.begin(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_file(self, repo: Repo, name: str) -> None:
        content = repo.files[name]
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": repo.commit}
        self.begin(200, headers | {"Content-Length": str(len(content))})
        if self.command != "HEAD":
            self.wfile.write(content)

    def begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
