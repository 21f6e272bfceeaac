"""The client of the control socket, used by panel and command line; no textual in here.

Use it so::

    async with ControlClient(role="panel", name="vq panel") as client:   # starts the supervisor
        state = await client.command("status")
        await client.command("start", {"spec": {"model": "/models/Qwen3-0.6B", "method": "kivi"}})
        async for item in client.events():        # never ends by itself; survives reconnects
            match item:
                case LinkChange(up=False): ...    # grey out, show item.reason
                case LinkChange(up=True): ...
                case Snapshot(): ...              # replaces everything that was known
                case Event(body=State()): ...     # `body` is State, Stats, Log, Progress, Request,
                                                  # Profile or Gap of `messages.py`

    run_command("stop", {"grace": 10.0})          # without an event loop, for the command line

Commands and what they answer (`dict`); every refusal raises `CommandError(code, message, hint)`:

    ======== ================================== ====================================================
    op       args                               result, and when it comes
    ======== ================================== ====================================================
    start    {"spec": {fields of LaunchSpec}}   {"state": State} once the process runs (or is running
                                                with the same spec); follow `State` events to `ready`.
                                                Refused with `usage`, `model_missing`, `port_taken`,
                                                `already_running`
    stop     {"grace": 10.0}                    {"state": State} when no process is left
    restart  {}                                 {"state": State}: stop, then start, same spec
    status   {}                                 {"state": State, "stats": Stats | None, "summary": {},
                                                "supervisor": {pid, version, epoch, uptime, viewers},
                                                "base_url": str | None, "token_file": str | None,
                                                "history": [past launches], "barred": bool}
    logs     {"last": 200, "level": "info",     {"lines": [{seq, t, wall, level, source, request,
             "grep": ""}                        text}], "dropped": count}
    audit    {}                                 the worker's own count of its bytes
    drain    {"grace": 10.0}                    {} when running answers are done; admits nothing new
    cancel   {"request": id}                    {} when the request is cut
    shutdown {}                                 {} ; the server is stopped and the supervisor leaves
    ======== ================================== ====================================================

`State` and `Stats` in results are plain dicts with every field, defaults included.
`events()` yields `LinkChange`, `Snapshot` and `Event`: after (re)connecting either a `Snapshot`
(first time, or when too much was missed) or just the events that were missed; nothing is doubled.
"""
