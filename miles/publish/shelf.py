"""The learner's shelf: versions as files over HTTP, for servers on machines without a shared disk."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from miles.publish.fetch import ADAPTER_FILES, FileFacts, Offer, sha256
from miles.publish.versions import NAME
from miles.web.door import Doorkeeper, Refused
from miles.web.listen import listening, make_server, parse_listen, url_of


class Shelf:
    """Serves what lies in `folder` to whoever shows its token, which is made anew for each run and handed out with each offer."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._token = folder, secrets.token_hex(32)
        self._door = Doorkeeper([self._token], "it stands in the offer of the version")
        self.url = ""  # known while `serving`

    def offer(self, path: Path, keep: tuple[int, ...]) -> Offer:
        """A file or folder of this shelf's folder, with the hash of each file."""
        places = sorted(path.iterdir()) if path.is_dir() else [path]
        files = tuple(
            FileFacts(str(place.relative_to(self._folder)), place.stat().st_size, sha256(place)) for place in places
        )
        return Offer(self.url, self._token, path.name, files, keep)

    @contextmanager
    def serving(self, listen: str) -> Iterator[None]:
        """`listen`: HOST:PORT. Raises BadInput where it cannot be used."""
        app = Starlette(routes=[Route("/{name}", self._answer), Route("/{name}/{part}", self._answer)])
        server = make_server(app, None, None)
        with listening(*parse_listen(listen)) as listener:
            self.url = url_of(listener.getsockname(), tls=False)
            thread = threading.Thread(
                target=lambda: asyncio.run(server.serve(sockets=[listener])), name="miles-shelf", daemon=True
            )
            thread.start()
            try:
                yield
            finally:
                server.should_exit = True
                thread.join()

    async def _answer(self, request: Request) -> Response:
        try:
            self._door.check(request)
            return FileResponse(self._place(**request.path_params))
        except Refused as refused:
            return JSONResponse({"error": {"message": str(refused)}}, refused.status)

    def _place(self, name: str, part: str | None = None) -> Path:
        """Raises Refused for everything but a file of a version."""
        place = self._folder / name if part is None else self._folder / name / part
        if not NAME.fullmatch(name) or (part is not None and part not in ADAPTER_FILES) or not place.is_file():
            raise Refused(404, "no such file of a version is on this shelf")
        return place
