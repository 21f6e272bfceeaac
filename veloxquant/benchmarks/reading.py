"""One text with facts in it, brought to caches of any kind."""

import copy
from typing import Any

import mlx.core as mx

from veloxquant.benchmarks.finds import Answers
from veloxquant.benchmarks.keepers import Keeper
from veloxquant.benchmarks.needles import Haystack, Needle
from veloxquant.benchmarks.questions import Questions, advance, step
from veloxquant.benchmarks.tape import Tape, chunks


class Reading:
    """A haystack as the exact cache reads it, with every question at its end as a branch."""

    def __init__(self, model: Any, hay: Haystack, n_layers: int) -> None:
        self.model, self.hay = model, hay
        self.before, self.last = hay.tokens[:-1], hay.tokens[-1]
        self.tape = Tape.blank(n_layers)
        for chunk in chunks(self.before):
            self.tape.read(model, chunk)
        self.end = self.tape.branch()
        self.end.step(model, self.last)
        self.asked: list[tuple[Tape, mx.array]] = []
        for needle in hay.needles:
            branch = self.tape.branch()
            branch.read(model, self.lead(needle))
            self.asked.append((branch, branch.step(model, needle.question[-1])))

    def lead(self, needle: Needle) -> list[int]:
        """The chunk before the last token of a prompt that ends with the question."""
        return [self.last, *needle.question[:-1]]

    def begin(self, keeper: Keeper) -> list[Any]:
        """New caches that have read all of the haystack but its last token."""
        caches = keeper.make()
        if keeper.reads == "text":
            for chunk in chunks(self.before):
                advance(self.model, caches, [chunk])
        else:
            # Who is judged by a repetition forgets what the prompt itself asked for.
            self.tape.play(caches, asked=keeper.reads != "repeat")
        return caches

    def complete(self, keeper: Keeper, caches: list[Any]) -> None:
        """Read the last token, after which rows go."""
        if keeper.reads == "tape":
            self.end.play(caches)
        else:
            step(self.model, caches, [self.last])
        mx.eval([cache.state for cache in caches])

    def ask_in_window(
        self, keeper: Keeper, begun: list[Any], questions: Questions, answers: Answers
    ) -> None:
        """Put every question as the end of the prompt, to copies of caches that have begun."""
        for needle, (branch, log_p) in zip(self.hay.needles, self.asked, strict=True):
            caches = copy.deepcopy(begun)
            if keeper.reads == "text":
                questions.put(caches, needle, answers, lead=self.lead(needle))
                continue
            branch.play(caches)
            questions.put(caches, needle, answers, heard=log_p[0])

    def ask_unknown(self, complete: list[Any], questions: Questions, answers: Answers) -> None:
        """Put every question to copies of caches that have given up rows of the prompt."""
        for needle in self.hay.needles:
            caches = copy.deepcopy(complete)
            questions.put(caches, needle, answers, lead=needle.question[:-1])
