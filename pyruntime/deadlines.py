"""When requests stop being wanted: checked by the step thread, without a timer a request."""

from __future__ import annotations

import heapq
import itertools

from pyruntime.jobs.base import Job


class Deadlines:
    """The open jobs that have a deadline. Used from the step thread only.

    Of a job that has ended only its place in the order may stay for a while, and never the job, whose results and
    tokens can be large and whose deadline far away.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []  # (deadline, number)
        self._jobs: dict[int, Job] = {}
        self._numbers: dict[Job, int] = {}
        self._count = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, job: Job) -> None:
        """Does nothing for a job without a deadline."""
        if job.deadline is None:
            return
        number = next(self._count)
        self._jobs[number] = job
        self._numbers[job] = number
        heapq.heappush(self._heap, (job.deadline, number))
        if len(self._heap) > 2 * len(self._jobs) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._jobs]
            heapq.heapify(self._heap)

    def discard(self, job: Job) -> None:
        """The job has ended; does nothing for one that is not here."""
        number = self._numbers.pop(job, None)
        if number is not None:
            del self._jobs[number]

    def passed(self, now: float) -> list[Job]:
        """The open jobs whose deadline is not after ``now``, the earliest first; they are forgotten."""
        jobs = []
        while self._heap and self._heap[0][0] <= now:
            job = self._jobs.get(heapq.heappop(self._heap)[1])
            if job is not None:
                self.discard(job)
                jobs.append(job)
        return jobs

    def seconds_left(self, now: float) -> float | None:
        """Until the next deadline; None when there is none."""
        while self._heap and self._heap[0][1] not in self._jobs:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - now) if self._heap else None
