"""How long a task of a function takes on a worker, and how uncertain that is. Learned from what ended where; no decisions.

    log(seconds) = log(work) - log(speed) + noise

*Work* belongs to the function, *speed* to the worker for that function. The prior of a speed is the worker's score with a standard deviation
of a factor of e, or of what the measured workers turn out to be off by; each task that ends pulls the speed to what was measured, the more the
less the function's tasks differ among themselves. So a right score serves from the first task, and a wrong one is forgotten within a few. Only
ratios of scores count: a common factor goes into the work.
"""

from __future__ import annotations

from math import exp, log, sqrt
from typing import Dict, List, Optional, Tuple

from gpumesh.config import FUNCTION_CACHE_ENTRIES
from gpumesh.model.ids import WorkerId

SPEED_MEMORY_TASKS = 16  # Of a worker: few enough to follow a machine that gets busy.
LENGTH_MEMORY_TASKS = 256.0  # Of a function: enough to know its rare long tasks.
PRIOR_VARIANCE = 1.0  # Of the logarithm of a score: a benchmark of matrices says no more about other work.
PRIOR_WEIGHT = 3.0  # Measured workers that this guess counts as much as, when it is compared with what they are off by.
LEAST_PRIOR_VARIANCE = 0.3
LEAST_UNMEASURED_VARIANCE = 0.7  # Who was never measured is trusted no more than this, however right the others' scores are.
NOISE_VARIANCE = 0.3  # Of the logarithm of lengths, as long as nobody has seen two tasks of the function ...
NOISE_WEIGHT = 2.0  # ... which counts as much as so many tasks.
LEAST_NOISE_VARIANCE = 0.003  # Clocks and other programs: 5 %.
SHORTEST_SECONDS = 1e-6  # Nothing is taken for less: clocks are not finer, and a division by it stays tame.
KEEP = 1.0 - 1.0 / LENGTH_MEMORY_TASKS
GROWTH = 1.0 + 1.0 / LENGTH_MEMORY_TASKS
DRIFT = 0.01  # Of the logarithm of a worker's mean: the sums over all workers need not be truer.
NEGLIGIBLE_VARIANCE = 0.02
BINS_PER_FACTOR_E = 3.0
GUESS_WEIGHT = 2.0  # Lengths are taken for exponential until seen; that guess counts as much as so many tasks.


class _Speed:
    """One worker's record for one function."""

    __slots__ = ("count", "mean_log", "prior_log", "weight", "seconds", "variance", "entered_log", "entered_count", "trust")

    def __init__(self, prior: float) -> None:
        self.count = 0.0  # Tasks, at most SPEED_MEMORY_TASKS.
        self.mean_log = 0.0  # Of their seconds.
        self.prior_log = log(prior)
        self.weight = 0.0  # In the function's mean of work.
        self.seconds = 0.0  # Expected, of the next task here.
        self.variance = PRIOR_VARIANCE  # Of the logarithm of that, as far as the speed is not known.
        self.entered_log = 0.0  # `mean_log` and `count` as the function's sums over its workers have them.
        self.entered_count = 0.0
        self.trust = 0.0  # In what was measured; the rest is in the prior.


class Function:
    """What is known about the run time of one function's tasks on one kind of device."""

    __slots__ = ("digest", "kind", "unit", "_speeds", "_noise", "_noise_weight", "_work_sum", "_work_weight", "_work_log", "_work", "_unmeasured", "_off", "_ratios", "_ratio",
                 "_bins", "_bin_unit", "_longest")  # fmt: skip

    def __init__(self, digest: bytes, kind: str = "") -> None:
        self.digest = digest
        self.kind = kind
        self.unit: Optional[float] = None  # Expected seconds on a worker of speed 1 that nobody has measured.
        self._speeds: Dict[WorkerId, _Speed] = {}
        self._noise = NOISE_VARIANCE * NOISE_WEIGHT
        self._noise_weight = NOISE_WEIGHT
        self._work_sum = 0.0  # Of weight * log(work), over the workers.
        self._work_weight = 0.0
        self._unmeasured = PRIOR_VARIANCE  # Of the logarithm of the speed of who was not measured, as far as it is known.
        self._work_log = 0.0  # The typical length of a task, in work: its logarithm,
        self._work = 1.0  # and itself.
        self._off = [0.0, 0.0, 0.0]  # Of log(work) as each worker would have it: the sum, that of squares, that of 1 / count.
        self._bins: Dict[int, List[float]] = {}  # Lengths over the typical one: [weight, weight * length], by the logarithm.
        self._ratios = [0.0, 0.0]  # The sums over all bins.
        self._ratio = 1.0  # Mean length over the typical one.
        self._bin_unit = 1.0
        self._longest = 1.0

    def measured_on(self, worker: WorkerId) -> Optional[float]:
        """Expected run time of one task where one has ended before; None elsewhere."""
        speed = self._speeds.get(worker)
        return None if speed is None else speed.seconds

    @property
    def is_known(self) -> bool:
        """Whether any task of it has ended anywhere."""
        return self.unit is not None

    def observe(self, worker: WorkerId, prior: float, seconds: float, count: int) -> None:
        """`count` tasks ended on a worker after `seconds` of run time in all; `prior`: the speed its score promises."""
        speed = self._speeds.get(worker)
        if speed is None:
            speed = self._speeds[worker] = _Speed(prior)
        mean_log = log(max(seconds / count, SHORTEST_SECONDS))
        off = mean_log - speed.mean_log
        seen = speed.count
        if seen:
            # Welford's step: the share of `off` that is not the mean's own error.
            self._noise = self._noise * KEEP + off * off * seen / (seen + 1.0)
            self._noise_weight = self._noise_weight * KEEP + 1.0
        if seen < SPEED_MEMORY_TASKS:
            seen = speed.count = min(seen + count, SPEED_MEMORY_TASKS)
            speed.mean_log += off * min(1.0, count / seen)
            self._enter(speed)
        else:
            speed.mean_log += off * min(1.0, count / SPEED_MEMORY_TASKS)
            if abs(speed.mean_log - speed.entered_log) > DRIFT:
                self._enter(speed)
        typical = speed.trust * speed.mean_log + (1.0 - speed.trust) * (self._work_log - speed.prior_log)
        self._add_length(mean_log - typical, count)
        self.unit = max(SHORTEST_SECONDS, self._work * self._ratio)
        speed.seconds = max(SHORTEST_SECONDS, exp(typical) * self._ratio)

    def observe_at_least(self, worker: WorkerId, prior: float, seconds: float) -> None:
        """A task was ended there after so long: it would have taken longer."""
        if self.unit is not None and seconds > self.seconds_on(worker, prior):
            self.observe(worker, prior, 2 * seconds, 1)  # As long again as it has run.

    def seconds_on(self, worker: WorkerId, prior: float) -> float:
        """Expected run time of one task; in units of nobody knows what while the function is not known."""
        speed = self._speeds.get(worker)
        if speed is not None:
            return speed.seconds
        return (1.0 if self.unit is None else self.unit) / prior

    def is_measured_on(self, worker: WorkerId) -> bool:
        """Whether a task of it has ended there."""
        return worker in self._speeds

    def overshoot(self, seconds: float, limit: float) -> float:
        """By how much a task that takes `seconds` on average is expected to end after `limit`: the mean of max(0, length - limit).

        That of an exponential length is seconds * exp(-limit / seconds).
        """
        late = GUESS_WEIGHT * seconds * exp(-max(0.0, limit) / seconds)
        if not self._bins:
            return late / GUESS_WEIGHT
        scale = seconds / self._ratio
        unit = self._bin_unit
        if scale * self._longest > limit:
            for weight, total in self._bins.values():
                over = scale * total - limit * weight
                if over > 0.0:
                    late += over / unit
        return late / (self._ratios[0] / unit + GUESS_WEIGHT)

    def risk(self, worker: WorkerId, seconds: float, limit: float) -> float:
        """The mean overshoot on a worker, over what its speed may be as well.

        Three nodes stand for the normal distribution of the logarithm of the speed (Gauss-Hermite: -sqrt(3), 0, sqrt(3) standard deviations,
        with weights 1/6, 2/3, 1/6).
        """
        speed = self._speeds.get(worker)
        variance = max(LEAST_UNMEASURED_VARIANCE, self._unmeasured) if speed is None else speed.variance
        if variance < NEGLIGIBLE_VARIANCE:
            return self.overshoot(seconds, limit)
        factor = exp(sqrt(3.0 * variance))
        return (
            self.overshoot(seconds / factor, limit)
            + 4.0 * self.overshoot(seconds, limit)
            + self.overshoot(seconds * factor, limit)
        ) / 6.0

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone; its like comes back under another id."""
        speed = self._speeds.pop(worker, None)
        if speed is None:
            return
        self._leave(speed)
        if not self._speeds:  # The last one: what it told of the work is all there is to know.
            self._work_sum = (speed.entered_log + speed.prior_log) * LEAST_NOISE_VARIANCE
            self._work_weight = LEAST_NOISE_VARIANCE
            self._off = [0.0, 0.0, 0.0]

    def _enter(self, speed: _Speed) -> None:
        """Bring the sums over all workers, and what follows from them, up to date with one worker's mean."""
        noise = max(LEAST_NOISE_VARIANCE, self._noise / self._noise_weight)
        self._leave(speed)
        speed.entered_log = speed.mean_log
        speed.entered_count = speed.count
        work_log = speed.mean_log + speed.prior_log
        speed.weight = 1.0 / (PRIOR_VARIANCE + noise / speed.count)
        self._work_sum += speed.weight * work_log
        self._work_weight += speed.weight
        off = self._off
        off[0] += work_log
        off[1] += work_log * work_log
        off[2] += 1.0 / speed.count
        self._work_log = self._work_sum / self._work_weight
        self._work = exp(self._work_log)
        prior_variance = self._unmeasured = self._prior_variance(noise)
        speed.trust = prior_variance / (prior_variance + noise / speed.count)  # How far the posterior leaves the prior.
        speed.variance = prior_variance * (1.0 - speed.trust)

    def _leave(self, speed: _Speed) -> None:
        if not speed.entered_count:
            return
        work_log = speed.entered_log + speed.prior_log
        self._work_sum -= speed.weight * work_log
        self._work_weight -= speed.weight
        off = self._off
        off[0] -= work_log
        off[1] -= work_log * work_log
        off[2] -= 1.0 / speed.entered_count

    def _prior_variance(self, noise: float) -> float:
        """Of the logarithms of scores: the guess, and what those who were measured differ by beyond the noise in their means."""
        count = len(self._speeds)
        if count < 2:
            return PRIOR_VARIANCE
        total, squares, inverse = self._off
        found = max(0.0, squares - total * total / count - noise * inverse)
        return max(LEAST_PRIOR_VARIANCE, (PRIOR_WEIGHT * PRIOR_VARIANCE + found) / (PRIOR_WEIGHT + count - 1))

    def _add_length(self, length_log: float, count: int) -> None:
        number = int(length_log * BINS_PER_FACTOR_E // 1.0)
        length = exp(length_log)
        self._bin_unit *= GROWTH if count == 1 else GROWTH ** min(count, LENGTH_MEMORY_TASKS)
        weight = self._bin_unit * count
        entry = self._bins.get(number)
        if entry is None:
            entry = self._bins[number] = [0.0, 0.0]
        entry[0] += weight
        entry[1] += weight * length
        ratios = self._ratios
        ratios[0] += weight
        ratios[1] += weight * length
        self._ratio = ratios[1] / ratios[0]
        self._longest = max(self._longest, length)
        if self._bin_unit > 1e6:
            self._renew()

    def _renew(self) -> None:
        """Bring the weights back to where single tasks count 1, and drop what has faded."""
        unit = self._bin_unit
        self._bin_unit = 1.0
        self._bins = {
            number: [weight / unit, total / unit] for number, (weight, total) in self._bins.items() if weight > unit * 1e-3
        }
        self._ratios = [sum(entry[0] for entry in self._bins.values()), sum(entry[1] for entry in self._bins.values())]
        self._longest = max(total / weight for weight, total in self._bins.values())


class Throughput:
    """One Function per digest and kind of device; the least recently defined go when there are too many."""

    __slots__ = ("_functions",)

    def __init__(self) -> None:
        self._functions: Dict[Tuple[bytes, str], Function] = {}

    def function(self, digest: bytes, kind: str = "") -> Function:
        """The record of a function, which is the newest from now on."""
        key = (digest, kind)
        function = self._functions.pop(key, None) or Function(digest, kind)
        self._functions[key] = function
        if len(self._functions) > FUNCTION_CACHE_ENTRIES:
            del self._functions[next(iter(self._functions))]
        return function

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        for function in self._functions.values():
            function.forget(worker)

    def known(self) -> List[Tuple[bytes, str]]:
        """Digests and kinds, the least recently defined first."""
        return list(self._functions)
