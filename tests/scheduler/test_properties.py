"""Whatever happens in whatever order: no block is lost or shared wrongly, and every sequence ends exactly once."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from pyruntime.scheduler.sequence import State
from pyruntime.scheduler.speculation import Speculation
from pyruntime.types import Task
from tests.scheduler.world import World

# Few different tokens and prefixes, so that prompts often share blocks.
STARTS = [[1] * 9, [1] * 5 + [2] * 4, [3] * 17]
lengths = st.integers(1, 20)
tails = st.lists(st.integers(1, 3), min_size=1, max_size=12)
starts = st.sampled_from(STARTS)
# None, or the most drafts of a sequence and the most rows beside which there are any.
speculations = st.sampled_from([None, (1, 3), (4, 6), (8, 32)])
fields = st.fixed_dictionaries({"priority": st.integers(-1, 2), "cache_salt": st.sampled_from(["", "", "a"])})


class Life(RuleBasedStateMachine):
    """Requests of every task and shape come, are cancelled, paused and resumed; steps run, fail and are retried."""

    window = None

    @staticmethod
    def draw(token_ids):
        """Cycles that a look at the text foresees, broken now and then."""
        return 1 + (token_ids[-1] + token_ids[-2] + (len(token_ids) % 7 == 0)) % 3

    @initialize(
        num_blocks=st.integers(12, 40),
        budget=st.sampled_from([3, 8, 32]),
        beside=st.sampled_from([0, 2]),
        factor=st.sampled_from([0, 3.0]),
        ageing=st.sampled_from([0.0, 0.05]),
        depth=st.sampled_from([0, 4, 4096]),
        cached=st.booleans(),
        speculation=speculations,
    )
    def begin(self, num_blocks, budget, beside, factor, ageing, depth, cached, speculation):
        self.requests = []
        self.world = World(
            num_blocks,
            budget=budget,
            cached=cached,
            window=self.window,
            max_prompt_tokens_beside=beside,
            max_pause_factor=factor,
            step_base_tokens=1,
            priority_ageing_s=ageing,
            equal_cost_depth=depth,
            draw=self.draw,
            speculation=speculation and Speculation(*speculation),
        )

    @rule(
        start=starts,
        tail=tails,
        new=st.integers(1, 16),
        n=st.integers(1, 3),
        drafts=st.sampled_from([True, True, False]),
        fields=fields,
    )
    def generate(self, start, tail, new, n, drafts, fields):
        self.requests.append(self.world.generate(start + tail, new, n, drafts, **fields))

    @rule(start=starts, tails=st.lists(tails, min_size=1, max_size=4), fields=fields)
    def items(self, start, tails, fields):
        self.requests.append(self.world.items(start, tails, Task.CLASSIFY if len(tails) > 2 else Task.SCORE, **fields))

    @rule(start=starts, tail=tails, reuses=st.booleans(), fields=fields)
    def embed(self, start, tail, reuses, fields):
        self.requests.append(self.world.embed(start + tail, reuses_prefix=reuses, **fields))

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        for _ in range(steps):
            self.world.step()

    @rule(choice=st.integers(0, 10**6))
    def cancel(self, choice):
        if self.requests:
            self.world.cancel(self.requests[choice % len(self.requests)])

    @rule(choice=st.integers(0, 10**6), resume=st.booleans())
    def pause_or_resume(self, choice, resume):
        streams = [s for s in self.world.live if s.num_generated]
        if streams:
            scheduler = self.world.scheduler
            (scheduler.resume if resume else scheduler.pause)(streams[choice % len(streams)])
            self.world.check()

    @rule(choice=st.integers(0, 10**6))
    def not_finite(self, choice):
        """A result that is not a number: its request ends, and nobody starts from its blocks."""
        live = [sequence for sequence in self.world.live if sequence.blocks]
        if live:
            self.world.scheduler.distrust(live[choice % len(live)])
            self.cancel(next(i for i, request in enumerate(self.requests) if live[choice % len(live)] in request))

    @rule(culprit=st.integers(0, 10**6), outcome=st.sampled_from(["cancel", "reset", "reset all"]))
    def step_that_fails(self, culprit, outcome):
        """Halves are run again until the culprit is alone; its request fails, or it is put back."""
        plan = self.world.plan()
        if not plan.entries:
            return
        culprit = plan.entries[culprit % len(plan.entries)][0]
        waiting = [plan]
        while waiting:
            part = waiting.pop()
            members = [sequence for sequence, _ in part.entries]
            if culprit not in members:
                self.world.run(part)
            elif len(members) > 1:
                waiting += [half for half in reversed(part.halves()) if half.entries]
            elif outcome == "cancel":
                self.world.cancel(next(request for request in self.requests if culprit in request))
            else:
                self.world.scheduler.reset(culprit)
                self.world.check()
        if outcome == "reset all":
            for sequence, _ in plan.entries:
                self.world.scheduler.reset(sequence)
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            assert all(s.state is State.FINISHED for request in self.requests for s in request)


class LifeInAWindow(Life):
    window = 3


@pytest.mark.parametrize("machine", [Life, LifeInAWindow])
def test_any_order_of_events_loses_nothing(machine, monkeypatch):
    # Tiles as wide as a block, so that these short sequences leave some behind.
    monkeypatch.setattr("pyruntime.scheduler.window.KEYS_A_TILE", 4)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=checks,
        ),
    )
