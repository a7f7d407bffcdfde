"""A local Hub with the few HTTP calls that pushing and loading a drafter needs.

    with LocalHub() as hub:
        subprocess.run(.., env=os.environ | hub.environment(cache))
        hub.commits["you/name"]["main"][-1]         # {file: bytes} of the newest commit

It keeps the Hub's guarantees that matter here: an LFS object is checked against its hash, a commit
names only existing objects, and is visible entirely or not at all. `fail` makes one kind of call
fail, by a dropped connection or a status.
"""

import base64
import hashlib
import json
import re
import threading
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

DROP = "drop"
TOKEN = "hf_of_the_tests"


class LocalHub(AbstractContextManager):
    """The repositories, and their server on a loopback port."""

    def __init__(self) -> None:
        # repository -> branch -> commits, each all files of the repository
        self.commits: dict[str, dict[str, list[dict[str, bytes]]]] = {}
        self.private: dict[str, bool] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by sha256
        self.calls: list[str] = []  # "PUT lfs", in order
        self.fail: dict[str, str | int] = {}  # call -> DROP or a status
        handler = type("Bound", (Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, cache: Path) -> dict[str, str]:
        """Environment variables that make huggingface_hub use only this server."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",  # only LFS is supported here
            "HF_HUB_OFFLINE": "0",
            "NO_PROXY": "127.0.0.1",
        }

    def sha(self, repo: str, branch: str) -> str:
        """The name of a branch's newest commit: a hash of its contents."""
        digest = hashlib.sha1(f"{repo} {branch} {len(self.commits[repo][branch])}".encode())
        return digest.hexdigest()

    def files(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]]:
        """Commit and files of a branch or a commit; KeyError when there is none."""
        for branch, commits in self.commits[repo].items():
            if revision in (branch, self.sha(repo, branch)):
                return self.sha(repo, branch), commits[-1]
        raise KeyError(revision)


class Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"
    ROUTES = (
        ("POST create", r"/api/repos/create", "create"),
        ("POST yaml", r"/api/validate-yaml", "validate"),
        ("POST branch", r"/api/models/(\S+?/\S+?)/branch/(\S+)", "branch"),
        ("POST preupload", r"/api/models/(\S+?/\S+?)/preupload/(\S+)", "preupload"),
        ("POST commit", r"/api/models/(\S+?/\S+?)/commit/(\S+)", "commit"),
        ("POST batch", r"/(\S+?/\S+?)\.git/info/lfs/objects/batch", "batch"),
        ("PUT lfs", r"/lfs/(\w+)", "store"),
        ("GET tree", r"/api/models/(\S+?/\S+?)/tree/([^/]+)/?", "tree"),
        ("GET info", r"/api/models/([^/]+/[^/]+)(?:/revision/(\S+))?", "info"),
        ("GET file", r"/(\S+?/\S+?)/resolve/([^/]+)/(\S+)", "resolve"),
    )

    def handle_call(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        path = unquote(urlsplit(self.path).path)
        verb = "GET" if self.command == "HEAD" else self.command
        for call, pattern, method in self.ROUTES:
            match = re.fullmatch(pattern, path)
            if not call.startswith(verb) or not match:
                continue
            self.hub.calls.append(call)
            failure = self.hub.fail.get(call)
            if failure == DROP:
                self.rfile.read(length // 2)  # in the middle of the client's request
                self.close_connection = True
                self.connection.close()
                return
            body = self.rfile.read(length)
            if failure is not None:
                return self.answer({"error": "the stand-in was told to fail"}, int(failure))
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and method != "store":
                return self.answer({"error": "Invalid credentials"}, 401)
            try:
                return getattr(self, method)(body, *match.groups())
            except KeyError as error:
                return self.answer({"error": f"not found: {error}"}, 404, not_found(method))
        self.answer({"error": f"the stand-in has no {self.command} {path}"}, 501)

    do_GET = do_HEAD = do_POST = do_PUT = handle_call  # noqa: N815

    def answer(self, content: dict | list, status: int = 200, headers: dict | None = None) -> None:
        self.send(json.dumps(content).encode(), status, headers)

    def send(self, body: bytes, status: int = 200, headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **(headers or {})}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """No access log in a test's output."""

    # -- pushing ---------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        wanted = json.loads(body)
        repo = f"{wanted['organization']}/{wanted['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.commits:
            return self.answer(url | {"error": "You already created this model repo"}, 409)
        self.hub.commits[repo] = {"main": [{".gitattributes": b"*.safetensors filter=lfs\n"}]}
        self.hub.private[repo] = wanted.get("visibility") == "private"
        self.answer(url)

    def validate(self, body: bytes) -> None:
        self.answer({"errors": [], "warnings": []})

    def branch(self, body: bytes, repo: str, branch: str) -> None:
        branches = self.hub.commits[repo]
        if branch in branches:
            return self.answer({"error": "Reference already exists"}, 409)
        branches[branch] = list(branches["main"])
        self.answer({})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        self.hub.files(repo, revision)
        large = (".safetensors", ".png")
        self.answer(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(large) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def batch(self, body: bytes, repo: str) -> None:
        objects = []
        for wanted in json.loads(body)["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}
            known = wanted["oid"] in self.hub.objects
            objects.append(wanted if known else wanted | {"actions": upload})
        self.answer({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer({"error": "wrong hash"}, 400)
        self.hub.objects[oid] = body
        self.answer({})

    def commit(self, body: bytes, repo: str, branch: str) -> None:
        files = dict(self.hub.commits[repo][branch][-1])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        self.hub.commits[repo][branch].append(files)
        sha = self.hub.sha(repo, branch)
        self.answer({"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha})

    # -- loading ---------------------------------------------------------------------------------

    def info(self, body: bytes, repo: str, revision: str | None) -> None:
        sha, files = self.hub.files(repo, revision or "main")
        siblings = [{"rfilename": name} for name in files]
        private = self.hub.private[repo]
        self.answer({"id": repo, "sha": sha, "private": private, "siblings": siblings})

    def tree(self, body: bytes, repo: str, revision: str) -> None:
        _, files = self.hub.files(repo, revision)
        self.answer(
            [
                {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
                for name, content in files.items()
            ]
        )

    def resolve(self, body: bytes, repo: str, revision: str, name: str) -> None:
        sha, files = self.hub.files(repo, revision)
        headers = {"X-Repo-Commit": sha, "ETag": f'"{git_hash(files[name])}"'}
        self.send(files[name], headers=headers)


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def not_found(method: str) -> dict[str, str]:
    """The header by which the client tells a missing file from a missing repository."""
    return {"X-Error-Code": "EntryNotFound" if method == "resolve" else "RepoNotFound"}
