"""A slow, direct validator of schedules as text: the oracle for `penstock.validate`.

It shares nothing with the library except the text of actions. It checks order and deadlock by executing the
lists: every rank that can take its next step takes it, until no rank can.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

Rows = Sequence[Sequence[str]]
MODELS = ("buffered", "edge-streams", "pair-streams", "shared-stream", "rendezvous")


@dataclass(frozen=True)
class Part:
    stage: int
    kind: str
    k: int


def parts_of(text: str) -> list[Part]:
    inner = text[1 : text.index(")")].split(";") if text.startswith("(") else [text]
    found = [re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", part) for part in inner]
    return [Part(int(m[1]), m[2], int(m[3] or 0)) for m in found if m]


@dataclass
class NaiveValidator:
    rows: Rows
    hosts: Sequence[int]
    microbatches: int
    parts: list[list[list[Part]]] = field(init=False)

    def __post_init__(self) -> None:
        self.parts = [[parts_of(text) for text in row] for row in self.rows]
        self.flat = [(r, part) for r, row in enumerate(self.parts) for step in row for part in step]
        self.communicates = any(part.kind[:5] in ("SEND_", "RECV_") for _, part in self.flat)

    # --- counts ------------------------------------------------------------------------------------

    def counts_are_valid(self) -> bool:
        if any(
            p.stage >= len(self.hosts) or p.k >= self.microbatches or self.hosts[p.stage] != r
            for r, p in self.flat
        ):
            return False
        count = Counter(part for _, part in self.flat)
        trains = any(part.kind in "IWB" for part in count)
        for stage, k in product(range(len(self.hosts)), range(self.microbatches)):
            f, i, w, b = (count[Part(stage, kind, k)] for kind in "FIWB")
            if f != 1 or (trains and (i, w, b) not in ((0, 0, 1), (1, 1, 0))):
                return False
            if not trains and (i or w or b):
                return False
            again, out, back = (count[Part(stage, kind, k)] for kind in ("RECOMPUTE", "OFFLOAD", "RELOAD"))
            if max(again, out) > int(trains) or out != back:
                return False
        return self._messages_are_valid(count, trains=trains) and self._reductions_are_valid(trains=trains)

    def _messages_are_valid(self, count: Counter[Part], *, trains: bool) -> bool:
        if not self.communicates:
            return not any(part.kind.startswith("WAIT_SEND_") for part in count)
        wanted: Counter[Part] = Counter()
        for a, k in product(range(len(self.hosts) - 1), range(self.microbatches)):
            if self.hosts[a] != self.hosts[a + 1]:
                wanted.update([Part(a, "SEND_F", k), Part(a + 1, "RECV_F", k)])
                if trains:
                    wanted.update([Part(a + 1, "SEND_B", k), Part(a, "RECV_B", k)])
        waits = Counter({p: n for p, n in count.items() if p.kind.startswith("WAIT_SEND_")})
        sends = Counter({p: n for p, n in wanted.items() if p.kind.startswith("SEND_")})
        if waits and waits != Counter({Part(p.stage, f"WAIT_{p.kind}", p.k): n for p, n in sends.items()}):
            return False
        return wanted == Counter({p: n for p, n in count.items() if p.kind[:5] in ("SEND_", "RECV_")})

    def _reductions_are_valid(self, *, trains: bool) -> bool:
        if not any("REDUCE_GRAD" in part.kind for _, part in self.flat):
            return True
        waited = any(part.kind == "WAIT_REDUCE_GRAD" for _, part in self.flat)
        for stage in range(len(self.hosts)):
            kinds = [p.kind for _, p in self.flat if p.stage == stage and p.kind in ("B", "W", "REDUCE_GRAD")]
            if kinds.count("REDUCE_GRAD") != int(trains) or (trains and kinds[-1] != "REDUCE_GRAD"):
                return False
            ends = [p.kind for _, p in self.flat if p.stage == stage and "REDUCE_GRAD" in p.kind]
            if waited and ends != ["REDUCE_GRAD", "WAIT_REDUCE_GRAD"] * int(trains):
                return False
        return True

    def sharding_is_valid(self) -> bool:
        if not any(part.kind in ("UNSHARD", "RESHARD") for _, part in self.flat):
            return True
        for stage in range(len(self.hosts)):
            state = "sharded"
            for _, part in self.flat:
                if part.stage != stage:
                    continue
                computes = part.kind in ("F", "I", "W", "B", "RECOMPUTE")
                move = {"UNSHARD": "U", "RESHARD": "R"}.get(part.kind, "C" if computes else "")
                after = {
                    ("sharded", "U"): "fresh",
                    ("fresh", "C"): "used",
                    ("used", "C"): "used",
                    ("used", "R"): "sharded",
                }
                if move:
                    if (state, move) not in after:
                        return False
                    state = after[state, move]
            if state != "sharded":
                return False
        return True

    def channels_are_in_order(self) -> bool:
        sent: dict[tuple[int, int], list[Part]] = {}
        received: dict[tuple[int, int], list[Part]] = {}
        for r, part in self.flat:
            if part.kind.startswith("SEND_"):
                sent.setdefault((r, self.hosts[self.other_end(part).stage]), []).append(part)
            elif part.kind.startswith("RECV_"):
                end = self.other_end(part)
                received.setdefault((self.hosts[end.stage], r), []).append(end)
        return sent == received

    @staticmethod
    def other_end(part: Part) -> Part:
        verb, value = part.kind.split("_")
        step = 1 if (verb == "SEND") == (value == "F") else -1
        return Part(part.stage + step, f"{'RECV' if verb == 'SEND' else 'SEND'}_{value}", part.k)

    # --- execution ---------------------------------------------------------------------------------

    def runs(self, model: str) -> bool:
        """Whether every rank reaches the end of its list, and every message is delivered."""
        at = [0] * len(self.rows)
        done: set[Part] = set()
        arrived: set[Part] = set()
        queues: list[list[Part]] = [[] for _ in self.rows]
        moved = True
        while moved:
            moved = self._deliver(model, queues, done, arrived)
            for r, row in enumerate(self.parts):
                while at[r] < len(row) and self._can(row[at[r]], done, arrived, model):
                    for part in row[at[r]]:
                        done.add(part)
                        if part.kind[:5] in ("SEND_", "RECV_"):
                            queues[r].append(part)
                    at[r] += 1
                    moved = True
                    if model == "rendezvous" and queues[r]:
                        break  # blocks until the message is delivered
                    self._deliver(model, queues, done, arrived)
        return all(at[r] == len(row) for r, row in enumerate(self.parts)) and not any(queues)

    def _can(self, step: list[Part], done: set[Part], arrived: set[Part], model: str) -> bool:
        for part in step:
            if part.kind.startswith("WAIT_"):
                begun = Part(part.stage, part.kind.removeprefix("WAIT_"), part.k)
                is_send = begun.kind != "REDUCE_GRAD"
                if begun not in done or (
                    is_send and model != "buffered" and self.other_end(begun) not in arrived
                ):
                    return False
        return all(self._input_is_available(part, done, arrived) for part in step)

    def _input_is_available(self, part: Part, done: set[Part], arrived: set[Part]) -> bool:
        def is_available(stage: int, kinds: str, value: str) -> bool:
            here = self.hosts[stage] == self.hosts[part.stage]
            if here or not self.communicates:
                return any(Part(stage, kind, part.k) in done for kind in kinds)
            return Part(part.stage, f"RECV_{value}", part.k) in arrived

        if not self._memory_is_there(part, done):
            return False
        if part.kind == "F":
            return part.stage == 0 or is_available(part.stage - 1, "F", "F")
        if part.kind in "IB":
            own = Part(part.stage, "F", part.k) in done
            return own and (part.stage == len(self.hosts) - 1 or is_available(part.stage + 1, "IB", "B"))
        if part.kind == "W":
            return Part(part.stage, "I", part.k) in done
        if part.kind.startswith("SEND_"):
            makers = "F" if part.kind == "SEND_F" else "IB"
            return any(Part(part.stage, kind, part.k) in done for kind in makers)
        return True

    def _memory_is_there(self, part: Part, done: set[Part]) -> bool:
        def is_done(kind: str) -> bool:
            return Part(part.stage, kind, part.k) in done

        def is_done_or_absent(kind: str) -> bool:
            return is_done(kind) or all(each != Part(part.stage, kind, part.k) for _, each in self.flat)

        if part.kind == "RECOMPUTE":
            return is_done("F") and is_done_or_absent("RELOAD")
        if part.kind == "OFFLOAD":
            return is_done("F") and not any(map(is_done, ("I", "B", "RECOMPUTE")))
        if part.kind == "RELOAD":
            return is_done("OFFLOAD")
        return part.kind not in "IB" or (is_done_or_absent("RECOMPUTE") and is_done_or_absent("RELOAD"))

    def _deliver(self, model: str, queues: list[list[Part]], done: set[Part], arrived: set[Part]) -> bool:
        """Deliver messages until none can be delivered."""
        any_moved = False
        moved = True
        while moved:
            moved = False
            for queue in queues:
                for part in list(queue):
                    if not part.kind.startswith("SEND_"):
                        continue
                    end = self.other_end(part)
                    there = queues[self.hosts[end.stage]]
                    if model == "buffered":
                        can = end in done
                    elif model == "edge-streams":
                        can = end in there and self._first_of_channel(part, queue, there)
                    elif model == "pair-streams":
                        can = end in there and self._first_of_pair(part, queue, there)
                    else:
                        can = queue[0] == part and bool(there) and there[0] == end
                    if can:
                        queue.remove(part)
                        there.remove(end)
                        arrived.add(end)
                        moved = any_moved = True
        return any_moved

    def _first_of_channel(self, part: Part, queue: list[Part], there: list[Part]) -> bool:
        end = self.other_end(part)
        target, source = self.hosts[end.stage], self.hosts[part.stage]
        sends = [p for p in queue if p.kind[:4] == "SEND" and self.hosts[self.other_end(p).stage] == target]
        receives = [p for p in there if p.kind[:4] == "RECV" and self.hosts[self.other_end(p).stage] == source]
        return sends[0] == part and receives[0] == end

    def _first_of_pair(self, part: Part, queue: list[Part], there: list[Part]) -> bool:
        end = self.other_end(part)
        target, source = self.hosts[end.stage], self.hosts[part.stage]
        local = [p for p in queue if self.hosts[self.other_end(p).stage] == target]
        remote = [p for p in there if self.hosts[self.other_end(p).stage] == source]
        return local[0] == part and remote[0] == end

    def is_valid(self) -> bool:
        return (
            self.counts_are_valid()
            and self.sharding_is_valid()
            and self.channels_are_in_order()
            and all(self.runs(model) for model in MODELS)
        )
