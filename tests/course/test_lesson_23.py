"""Answers of the capstone that are right in another way than the solution; each is a change of it."""

from __future__ import annotations

import pytest

from tinyvllm_ref import emulation
from tinyvllm_ref.course.answers import make_answer
from tinyvllm_ref.course.exercise import Exercise
from tinyvllm_ref.course.exercises import exercise_of
from tinyvllm_ref.course.judging import judge
from tinyvllm_ref.course.lessons import solution_cell


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch):
    """Nothing of the person who runs the tests takes part."""
    monkeypatch.setenv("TINYVLLM_MY_ENGINE", str(tmp_path / "my_engine"))


def _solution(id: str) -> str:
    text = solution_cell(id)
    assert text is not None
    return text


def _changed(id: str, *changes: tuple[str, str]) -> str:
    text = _solution(id)
    for old, new in changes:
        assert text.count(old) == 1, (id, old)
        text = text.replace(old, new)
    return text


RIGHT = {
    "23.1, sample serves the greedy ones as well": _changed(
        "23.1", ("        if all(p.temperature == 0 for p in params):\n", "        if not params:\n")
    ),
    "23.1, decodes into an array of their own": _changed(
        "23.1",
        (
            "tables, lens, scale, out[:d])",
            "tables, lens, scale, own := cp.empty(q[:d].shape, np.uint16))\n            out[:d] = own",
        ),
    ),
    "23.1, one warp copies a row": _changed(
        "23.1",
        (
            "for (int c = threadIdx.x; c < width; c += blockDim.x)",
            "if (threadIdx.x < 32) for (int c = threadIdx.x; c < width; c += 32)",
        ),
    ),
    "23.1, the ended are found by their state": _changed(
        "23.1",
        (
            "        for request in self.scheduler.update(batch, ids):\n"
            "            del self.requests[request.request_id]\n",
            "        self.scheduler.update(batch, ids)\n"
            "        self.requests = {id: one for id, one in self.requests.items() if not one.finished}\n",
        ),
    ),
    "23.2, nobody comes in where somebody was preempted": _changed(
        "23.2", ("while self.waiting and len", "while not batch.preempted and self.waiting and len")
    ),
    "23.2, blocks for all tokens of a running request": _changed(
        "23.2", ("request.num_computed_tokens + count):", "request.num_tokens):")
    ),
    "23.2, lists for the queues": _changed(
        "23.2",
        ("self.waiting, self.running = deque(), []", "self.waiting, self.running = [], []"),
        ("self.waiting.popleft()", "self.waiting.pop(0)"),
        ("self.waiting.appendleft(request)", "self.waiting.insert(0, request)"),
    ),
    "23.2, a copy of the list, in which the preempted are passed over": _changed(
        "23.2",
        (
            "        index = 0\n        while index < len(self.running):\n            request = self.running[index]\n",
            "        for request in list(self.running):\n"
            "            if request not in self.running:\n                continue\n",
        ),
        ("                index += 1\n", ""),
    ),
    "23.3, the beginning of a stop string is looked for from the left": _changed(
        "23.3",
        (
            _solution("23.3").split("        text = self.held + piece\n")[1].split("\n\n\ndef generate")[0],
            """        for at in range(len(text)):
            self.held, rest = "", text[at:]
            for stop in self.stops:
                if rest.startswith(stop):
                    self.found = stop
                    return text[:at]
                if stop.startswith(rest):
                    self.held = rest
            if self.held:
                return text[:at]
        self.held = ""
        return text""",
        ),
    ),
    "23.3, the new tokens in one piece": _changed(
        "23.3",
        (
            "            for id in new:\n                if stops[number].found is None:\n"
            "                    give(number, stops[number].push(streams[number].push(id)))\n",
            '            give(number, stops[number].push("".join(map(streams[number].push, new))))\n',
        ),
    ),
    "23.3, aborted even if it has ended": _changed(
        "23.3",
        ("                if not output.finished:\n                    engine", "                engine"),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_an_answer_that_is_right_in_another_way_passes(name: str) -> None:
    source = RIGHT[name]
    exercise = exercise_of(name[:4])
    assert isinstance(exercise, Exercise)
    before = {earlier: _solution(earlier) for earlier in exercise.builds_on}
    verdict = judge(exercise, make_answer(exercise, source, emulation, before=before), emulation)
    assert verdict.passed, verdict.first_failure
