"""A client that loads a server with requests, and notes when their tokens come.

    python -m benchmarks.serving_client URL < jobs.json > times.json

`jobs` is a list of [seconds until it is sent, body of /v1/completions]; the answer a list of the
times of each request's pieces, in seconds since it was sent, with how many characters each has. It
runs in a process of its own, without torch, so that it takes no time from the server's.
"""

import asyncio
import json
import sys
import time
from typing import Any
from urllib.parse import urlsplit

Pieces = list[tuple[float, int]]


async def send(host: str, port: int, delay: float, body: dict[str, Any]) -> Pieces:
    """The pieces of one request's stream."""
    await asyncio.sleep(delay)
    content = json.dumps({**body, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + content)
    pieces: Pieces = []
    try:
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError((status + await reader.read()).decode(errors="replace"))
        # Lines of HTTP's own, between the pieces, do not begin so.
        async for line in reader:
            if not line.startswith(b"data: {"):
                continue
            now = time.perf_counter() - began
            piece = json.loads(line.removeprefix(b"data: "))
            if "error" in piece:
                raise RuntimeError(piece["error"]["message"])
            pieces += [(now, len(choice["text"])) for choice in piece["choices"] if choice["text"]]
    finally:
        writer.close()
    return pieces


async def load(url: str, jobs: list[tuple[float, dict[str, Any]]]) -> list[Pieces]:
    """The pieces of all requests."""
    address = urlsplit(url)
    assert address.hostname is not None
    assert address.port is not None
    return await asyncio.gather(*(send(address.hostname, address.port, *job) for job in jobs))


if __name__ == "__main__":
    json.dump(asyncio.run(load(sys.argv[1], json.load(sys.stdin))), sys.stdout)
