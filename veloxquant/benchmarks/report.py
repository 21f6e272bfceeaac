"""Results as Markdown tables, for people and for `benchmarks.md`."""

from collections.abc import Sequence
from typing import Any

CARE = """Read with care: where the rival "has fewer bytes", its largest setting is smaller than
ours and the line is no comparison at equal bytes. mlx-lm's cache has no width between 2 and 4
bits, so what it would reach there is interpolated. Eviction by lot keeps no positions and holds
up to 2 % fewer bytes. It is one stretch of one text: differences within two or three standard
errors say nothing."""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _holds(value: bool) -> str:
    return "yes" if value else "**no**"


def _verdict(found: dict[str, Any]) -> str:
    """Whether it holds; a plain no where it is no target, and why where it was expected."""
    if found.get("excused"):
        return f"no, as expected: {found['excused']}"
    return _holds(found["holds"]) if found.get("judged", True) else _plain(found["holds"])


def _plain(value: bool) -> str:
    return "yes" if value else "no"


def machine(facts: dict[str, str]) -> str:
    """What was measured on."""
    return _table(("", ""), list(facts.items()))


def quality(result: dict[str, Any]) -> str:
    """KL by bytes, and who is better at equal bytes."""
    size = result["size"]
    outcomes = _table(
        ("cache", "bits a value", "MiB", "KL to fp16", "±", "same top token", "perplexity"),
        [
            (
                o["name"] + " (default)" * o.get("default", False), f"{o['bits']:.2f}",
                f"{o['nbytes'] / 2**20:.2f}", f"{o['kl']:.4f}",
                f"{o['kl_error']:.4f}", f"{o['same_top']:.1%}", f"{o['perplexity']:.2f}",
            )
            for o in sorted(result["outcomes"], key=lambda o: -o["nbytes"])
        ],
    )  # fmt: skip
    verdicts = _table(
        ("cache", "KL", "rival's KL at the same bytes", "from", "not worse"),
        [
            (v["name"], f"{v['kl']:.4f}", f"{v['rival_kl']:.4f}", v["how"], _verdict(v))
            for v in result["verdicts"]
        ],
    )
    return (
        f"Prompt of {size['prompt']} tokens in chunks of 256, then {size['steps']} single "
        f"teacher-forced steps, where everything is measured. Bytes are those held at the end, "
        f"growth steps and exact windows included, floats counted as 16 bits. Methods run without "
        f"a calibration of the model. The text is short so that every method and width fits into "
        f"one run: windows of exact tokens weigh more here than in a long context.\n\n"
        f"{outcomes}\n\n"
        f"At equal bytes. The rival of packed caches is mlx-lm's `QuantizedKVCache`; between two "
        f"of its settings the logarithm of KL is a straight line in bytes (a bit more divides KL "
        f"by four). The rival of evicting caches is eviction by lot at the same budget, which "
        f"keeps the first tokens, too. Targets are the defaults of a method; other widths are for "
        f"information.\n\n{verdicts}\n\n{_asked(result.get('targets', []))}\n\n{CARE}"
    )


def retrieval(result: dict[str, Any]) -> str:
    """What methods that give up tokens still find, a table a length."""
    filters = (
        "Filters of qfilters are measured on another part of the text"
        if result["calibrated"]
        else "qfilters takes its filters from the prompt, without a calibration"
    )
    text = (
        f"Facts in prose, one sentence each, at depths from 5 to 95 %; each is asked for by its "
        f"beginning. In the window: the question ends the prompt, and is seen when rows go. "
        f"Unknown: the prompt is compressed, then the question comes. Found: every digit is the "
        f"likeliest token; log-probability: mean over the digits. KL: prose that goes on after the "
        f"compressed prompt, token by token. Methods are at their defaults but for the budget, a "
        f"share of the prompt's tokens in rows a KV head (the mean over layers). {filters}. Bytes "
        f"are those held after the prompt, growth steps included, floats counted as 16 bits. "
        f"`random` evicts by lot at the prompt's end, `random, always` after each of its chunks "
        f"as methods with a fixed score do; both keep the first tokens and the newest."
    )
    for size in result["sizes"]:
        rows = [f for f in result["finds"] if f["prompt"] == size["prompt"]]
        text += (
            f"\n\nPrompt of {size['prompt']} tokens, {size['haystacks']} x {size['needles']} "
            f"questions, KL of {size['steps']} tokens:\n\n{_finds(rows)}"
        )
        if size["without"]:
            text += f"\n\nLeft out at this length for its time: {'; '.join(size['without'])}."
    return f"{text}\n\nTargets:\n\n{_asked(result['targets'])}"


def _finds(finds: Sequence[dict[str, Any]]) -> str:
    """One length."""

    def mean(values: Sequence[float], form: str) -> str:
        return format(sum(values) / len(values), form) if values else "–"

    return _table(
        (
            "method", "of the tokens", "MiB", "found, in the window", "found, unknown",
            "log-probability, in the window", "log-probability, unknown", "KL to fp16", "±",
        ),
        [
            (
                f["name"], f"{f['share']:.0%}", f"{f['nbytes'] / 2**20:.2f}",
                *(mean(f[side]["found"], ".0%") for side in ("window", "unknown")),
                *(mean(f[side]["logp"], ".2f") for side in ("window", "unknown")),
                f"{f['kl']:.4f}", f"{f['kl_error']:.4f}",
            )
            for f in finds
        ],
    )  # fmt: skip


def speed(result: dict[str, Any]) -> str:
    """Decode attention of one layer."""
    rows = _table(
        ("shape", "T", "cache", "ms a step", "of dense", "processor time", "all steps", "MiB"),
        [
            (
                r["heads"], str(r["tokens"]), r["name"], f"{r['milliseconds']:.2f}",
                f"{r['wall']:.2f}", f"{r['processor']:.2f}", f"{r['total']:.2f}",
                f"{r['nbytes'] / 2**20:.2f}",
            )
            for r in result["rows"]
        ],
    )  # fmt: skip
    targets = _table(
        ("shape", "T", "cache", "against", "at most", "reached", "holds"),
        [
            (
                t["heads"], str(t["tokens"]), t["name"], t["against"], f"{t['ratio']:.2f}",
                f"{t['reached']:.2f}", _holds(t["holds"]),
            )
            for t in result["targets"]
        ],
    )  # fmt: skip
    text = (
        f"One decode step, interleaved. Ratios to the dense cache: medians of wall time and of "
        f"processor time, and the quotient of all processor time, which counts the steps that "
        f"pack a block.\n\n{rows}\n\nTargets, by processor time on a CPU:\n\n{targets}"
    )
    if result["growth"]:
        lengths = result["growth"][0]["tokens"]
        grown = _table(
            ("cache", *(f"T={n}, ms" for n in lengths), "no faster than T"),
            [
                (g["name"], *(f"{ms:.2f}" for ms in g["milliseconds"]), _holds(g["holds"]))
                for g in result["growth"]
            ],
        )
        text += f"\n\nGrowth, {result['growth'][0]['heads']}:\n\n{grown}"
    return text


def _asked(targets: Sequence[dict[str, Any]]) -> str:
    """Targets that say in words what they ask."""
    return _table(
        ("what", "asked", "reached", "holds"),
        [(t["name"], t["asked"], f"{t['reached']:.2f}", _verdict(t)) for t in targets],
    )


def methods(result: dict[str, Any]) -> str:
    """Every quantising method: bytes, decode step, prompt."""
    size, slots = result["size"], result["decode"]
    lengths = list(dict.fromkeys(r["tokens"] for r in slots))
    steps = {(r["name"], r["tokens"]): r for r in slots}
    prompts = {r["name"]: r for r in result["prompts"]}
    rows = _table(
        (
            "method", "MiB", "ratio", "planned", "shared, KiB",
            *(head for n in lengths for head in (f"step, T={n}, ms", "of dense")),
            "prompt, s", "with attention, s",
        ),
        [
            (
                r["name"], f"{r['nbytes'] / 2**20:.2f}", f"{r['ratio']:.2f}",
                "" if r["planned"] is None else f"{r['planned']:.2f}",
                f"{r['shared'] / 2**10:.0f}",
                *(cell for n in lengths for cell in (
                    f"{steps[r['name'], n]['milliseconds']:.2f}",
                    f"{steps[r['name'], n]['of_dense']:.2f}",
                )),
                f"{prompts[r['name']]['judged'] / 1e3:.2f}",
                f"{prompts[r['name']]['attend_judged'] / 1e3:.2f}",
            )
            for r in result["sizes"]
        ],
    )  # fmt: skip
    text = (
        f"One layer at the defaults, {size['heads']}. Bytes of {size['held']} tokens against rows "
        f"of 16 bits; constants that layers share are not in them. Steps take turns with the dense "
        f"cache; ratios and seconds are medians by processor time on a CPU. A prompt is "
        f"{size['prompt']} tokens in chunks of 512 into an empty cache.\n\n{rows}\n\n"
        f"Targets:\n\n{_asked(result['targets'])}"
    )
    if result["left_out"]:
        text += f"\n\nLeft out, since their layers share state: {', '.join(result['left_out'])}."
    return text


def evicting(result: dict[str, Any]) -> str:
    """Every method that gives up tokens: decode step, prompt."""
    size = result["size"]
    steps = {(r["name"], r["tokens"], r["budget"]): r for r in result["decode"]}
    rows = []
    for prompt in result["prompts"]:
        whole, first, last = (
            steps[prompt["name"], n, budget]
            for n, budget in (
                (size["long"], size["long"]), (size["short"], size["budget"]),
                (size["long"], size["budget"]),
            )
        )  # fmt: skip
        rows.append(
            (
                prompt["name"], f"{whole['milliseconds']:.2f}", f"{whole['of_dense']:.2f}",
                f"{first['milliseconds']:.2f}", f"{last['milliseconds']:.2f}",
                f"{last['of_dense']:.2f}", f"{prompt['judged'] / 1e3:.2f}",
                f"{prompt['dense'] / 1e3:.2f}",
            )
        )  # fmt: skip
    table = _table(
        (
            "method", f"step, all {size['long']} rows, ms", "of dense",
            f"step, {size['budget']} rows after {size['short']} tokens, ms",
            f"after {size['long']}, ms", "of dense", "prompt, s", "of dense, s",
        ),
        rows,
    )  # fmt: skip
    return (
        f"One layer, {size['heads']}, exact rows. Steps take turns with the dense cache of "
        f"{size['long']} tokens: with a budget of all of them, so that nothing is saved, and with "
        f"one of {size['budget']} rows. Ratios and seconds are medians by processor time on a CPU. "
        f"A prompt is {size['prompt']} tokens with attention in chunks of 512 into an empty cache "
        f"of the small budget.\n\n{table}\n\nTargets:\n\n{_asked(result['targets'])}"
    )


def prefill(result: dict[str, Any]) -> str:
    """Attention of prompts over packed history, and the encoders."""
    rows = _table(
        ("prompt", "history", "shape", "cache", "ms", "of dense", "of mlx-lm 4 bit"),
        [
            (
                str(r["prompt"]), str(r["history"]), r["heads"], r["name"],
                f"{r['milliseconds']:.1f}", f"{r['of_dense']:.2f}", f"{r['of_stock']:.2f}",
            )
            for r in result["rows"]
        ],
    )  # fmt: skip
    _, heads, tokens, dim = result["shape"]
    encoders = _table(
        ("format", "ms", "by the clock that counts, ms"),
        [(e["name"], f"{e['milliseconds']:.2f}", f"{e['judged']:.2f}") for e in result["encoders"]],
    )
    return (
        f"One layer takes a chunk of a prompt, interleaved: writes it and attends causally to "
        f"everything. Ratios are medians by processor time on a CPU.\n\n{rows}\n\n"
        f"Encoders, {tokens} tokens x {heads} heads, D={dim}:\n\n{encoders}\n\n"
        f"Targets, by processor time on a CPU:\n\n{_asked(result['targets'])}"
    )


def serving(result: dict[str, Any]) -> str:
    """Decode of the whole model."""
    rows = _table(
        ("T", "cache", "tokens a second", "of fp16", "by processor time", "all steps", "MiB"),
        [
            (
                str(r["context"]), r["name"], f"{r['tokens_per_second']:.2f}", f"{r['wall']:.2f}",
                f"{r['processor']:.2f}", f"{r['total']:.2f}", f"{r['nbytes'] / 2**20:.2f}",
            )
            for r in result["rows"]
        ],
    )  # fmt: skip
    return (
        f"One token a turn for every cache, interleaved. Ratios of tokens a second to `fp16`: "
        f"medians by wall and by processor time, and of all processor time. mlx-lm's 4-bit cache "
        f"cannot join a batch and runs alone through `generate_step`.\n\n{rows}\n\n"
        f"Targets, by processor time on a CPU:\n\n{_asked(result['targets'])}"
    )


def pool(result: list[dict[str, Any]]) -> str:
    """The block pool."""
    return _table(
        ("case", "value", "unit"),
        [(row["case"], f"{row['value']:,.2f}", row["unit"]) for row in result],
    )


TITLES = {
    "quality": ("Quality", quality),
    "retrieval": ("Retrieval", retrieval),
    "speed": ("Decode attention of one layer", speed),
    "methods": ("Quantising methods", methods),
    "evicting": ("Evicting methods", evicting),
    "prefill": ("Prompt attention and encoders", prefill),
    "worker": ("Decode of the whole model", serving),
    "pool": ("Block pool", pool),
}


def document(facts: dict[str, str], results: dict[str, Any]) -> str:
    """Everything as one Markdown document."""
    parts = [
        "# Benchmarks",
        "Made by `make bench`. Compare within a table, not across: other work may have run beside.",
        machine(facts),
    ]
    for name, result in results.items():
        title, render = TITLES[name]
        parts += [f"## {title}", render(result)]
    return "\n\n".join(parts) + "\n"
