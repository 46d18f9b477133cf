"""Two engines without time under every order of calls: tokens stay those of the undisturbed run, blocks add up."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from midstream.control.errors import Refused
from midstream.instance.engines.sim.config import SimConfig
from midstream.instance.engines.sim.core import EngineCore, Pinned
from midstream.instance.engines.sim.reference import reference_output
from midstream.instance.engines.sim.run import Reservation
from midstream.migration.protocol.messages import RequestSpec, Sampling

CONFIG = SimConfig(blocks_total=14, block_tokens=3, slots_max=3, step_tokens_max=7, eos_probability=0.02)
PLACES = (0, 1)


class Move:
    """One move in progress: what a llumlet would remember of it."""

    def __init__(self, source: int, slot: str, reservation: Reservation) -> None:
        self.source, self.slot, self.reservation = source, slot, reservation
        self.next_block = reservation.cached
        self.preemptions = -1


class EngineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cores = [EngineCore(CONFIG), EngineCore(CONFIG)]
        self.specs: dict[str, RequestSpec] = {}
        self.outputs: dict[str, list[int]] = {}
        self.finishes: dict[str, str] = {}
        self.moves: list[Move] = []
        self.pins: list[tuple[int, Pinned]] = []
        self.serial = 0

    def request_of(self, slot: str) -> str:
        return slot.partition("/")[0]

    def runs(self, place: int) -> list[str]:
        return sorted(self.cores[place].runs)

    @rule(
        place=st.sampled_from(PLACES),
        prompt=st.integers(1, 4),
        length=st.integers(1, 14),
        tokens=st.integers(1, 14),
        seed=st.integers(0, 3),
        priority=st.integers(0, 1),
    )
    def submit(self, place: int, prompt: int, length: int, tokens: int, seed: int, priority: int) -> None:
        self.serial += 1
        sampling = Sampling(max_tokens=tokens, temperature=0.5 * seed, seed=seed, frequency_penalty=0.2 * seed)
        spec = RequestSpec(
            request=f"r{self.serial}", prompt=(prompt,) * length, sampling=sampling, priority=priority
        )  # few prompts, so that prefixes are shared
        self.specs[spec.request] = spec
        self.outputs[spec.request] = []
        self.cores[place].submit(spec.request, spec, ())

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 6))
    def steps(self, place: int, count: int) -> None:
        core = self.cores[place]
        for _ in range(count):
            for output in [run.tell(finish) for run, finish in core.apply(core.plan()).sampled]:
                request = self.request_of(output.slot)
                assert output.first == len(self.outputs[request])
                self.outputs[request] += output.ids
                if output.finish is not None:
                    self.finishes[request] = output.finish

    @precondition(lambda self: any(core.runs for core in self.cores))
    @rule(data=st.data())
    def freeze_or_thaw(self, data: st.DataObject) -> None:
        core = self.cores[data.draw(st.sampled_from([p for p in PLACES if self.cores[p].runs]))]
        run = core.runs[data.draw(st.sampled_from(sorted(core.runs)))]
        if run.is_frozen:
            core.thaw(run)
        else:
            state = core.freeze(run)
            assert core.freeze(run) == state

    @precondition(lambda self: any(core.runs for core in self.cores))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        core = self.cores[data.draw(st.sampled_from([p for p in PLACES if self.cores[p].runs]))]
        run = core.runs[data.draw(st.sampled_from(sorted(core.runs)))]
        held = len(run.table)
        assert core.drop(run) == held
        assert core.drop(run) == 0
        del self.specs[self.request_of(run.slot)]

    @precondition(lambda self: any(core.runs for core in self.cores))
    @rule(data=st.data(), headroom=st.integers(0, 4))
    def prepare(self, data: st.DataObject, headroom: int) -> None:
        source = data.draw(st.sampled_from([p for p in PLACES if self.cores[p].runs]))
        slot = data.draw(st.sampled_from(self.runs(source)))
        if any(move.slot == slot for move in self.moves):
            return
        run = self.cores[source].runs[slot]
        blocks = len(run.table) + headroom if run.table else 0
        outputs = tuple(run.tokens[run.prompt_tokens :])
        try:
            reservation = self.cores[1 - source].reserve(f"{slot}/", run.spec, outputs, blocks)
        except Refused:
            return
        self.moves.append(Move(source, slot, reservation))

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        move = data.draw(st.sampled_from(self.moves))
        if move.slot in self.cores[move.source].runs:
            self.copy_round(move)

    def copy_round(self, move: Move) -> bool:
        source, target = self.cores[move.source], self.cores[1 - move.source]
        run = source.runs[move.slot]
        if move.preemptions not in (-1, run.preemptions):
            return False
        move.preemptions = run.preemptions
        pinned = source.pin(run, move.next_block)
        try:
            for index, block in enumerate(pinned.blocks, move.next_block):
                target.incoming(move.reservation, index)[:] = source.bytes_of(block)
        except IndexError:
            return False
        finally:
            source.unpin(pinned)
        if not run.is_frozen:
            move.next_block += len(pinned.blocks)
        return source.fate(pinned) is None

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), commit=st.booleans())
    def finish_move(self, data: st.DataObject, commit: bool) -> None:
        move = data.draw(st.sampled_from(self.moves))
        self.moves.remove(move)
        source, target = self.cores[move.source], self.cores[1 - move.source]
        run = source.runs.get(move.slot)
        if run is None or not commit:
            target.cancel(move.reservation)
            assert target.cancel(move.reservation) == 0
            return
        state = source.freeze(run)
        if state.computed and not self.copy_round(move):
            target.cancel(move.reservation)
            source.thaw(run)
            return
        target.adopt(move.reservation, state)
        source.drop(run)

    @precondition(lambda self: any(core.runs for core in self.cores))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([p for p in PLACES if self.cores[p].runs]))
        run = self.cores[place].runs[data.draw(st.sampled_from(self.runs(place)))]
        self.pins.append((place, self.cores[place].pin(run, 0)))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self) -> None:
        place, pinned = self.pins.pop(0)
        self.cores[place].unpin(pinned)

    @invariant()
    def blocks_add_up(self) -> None:
        for core in self.cores:
            account = core.account()
            assert account.owned + account.free + account.reserved == account.total
            assert core.faults() == ()

    @invariant()
    def outputs_are_those_of_the_undisturbed_run(self) -> None:
        for request, spec in self.specs.items():
            ids, finish = reference_output(spec, CONFIG)
            made = self.outputs[request]
            assert tuple(made) == ids[: len(made)]
            if request in self.finishes:
                assert (len(made), self.finishes[request]) == (len(ids), finish)

    def teardown(self) -> None:
        """Everything is let go: all runs end, all blocks come back."""
        for place, pinned in self.pins:
            self.cores[place].unpin(pinned)
        for move in self.moves:
            self.cores[1 - move.source].cancel(move.reservation)
        for place in PLACES:
            core = self.cores[place]
            for run in list(core.runs.values()):
                core.thaw(run)
            for _ in range(2_000):
                if not core.runs:
                    break
                self.steps(place, 1)
            assert core.runs == {}, "a run does not come to its end"
            assert core.account().free == CONFIG.blocks_total
        self.outputs_are_those_of_the_undisturbed_run()
        assert all(request in self.finishes for request in self.specs)


TestP03P05P07Engines = EngineMachine.TestCase
TestP03P05P07Engines.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
