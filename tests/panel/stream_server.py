"""A small OpenAI-like server for the keeper: streams as told, counts who hung up."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class StreamServer:
    """`go` lets the second half of a stream through; `gone` is set when the client hangs up."""

    def __init__(self, status=200, pieces=("Hel", "lo ", "wörld ", "漢字"), hold=False, cut=False):
        self.status, self.pieces, self.cut = status, pieces, cut
        self.go, self.gone, self.begun = threading.Event(), threading.Event(), threading.Event()
        if not hold:
            self.go.set()
        self.bodies, self.headers = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                """Say nothing."""

            def do_POST(self):
                outer.headers.append(dict(self.headers))
                length = int(self.headers["Content-Length"])
                outer.bodies.append(json.loads(self.rfile.read(length)))
                if outer.status != 200:
                    body = json.dumps({"error": {"message": "the context is full"}}).encode()
                    self.send_response(outer.status)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Connection", "close")
                self.end_headers()
                try:
                    outer.stream(self.wfile)
                except OSError:
                    outer.gone.set()
                self.close_connection = True

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stream(self, out):
        half = len(self.pieces) // 2
        for i, piece in enumerate(self.pieces):
            if i == half:
                self.begun.set()
                while not self.go.wait(0.05):
                    out.write(b": still here\n\n")
                    out.flush()
            self.event(out, {"choices": [{"delta": {"content": piece}}]})
        if self.cut:
            return
        self.event(out, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
        self.event(out, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 4}})
        out.write(b"data: [DONE]\n\n")
        out.flush()

    @staticmethod
    def event(out, value):
        out.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        out.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.go.set()
        self.server.shutdown()
        self.server.server_close()
