"""When requests stop being wanted: checked by the step thread, without a timer a request."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection

from pyruntime.jobs.base import Job


class Deadlines:
    """Jobs by deadline. ``open_jobs``: those that have not ended yet, as the engine keeps them; ended ones are skipped.

    Used from the step thread only.
    """

    def __init__(self, open_jobs: Collection[Job]) -> None:
        self._open = open_jobs
        self._heap: list[tuple[float, int, Job]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, job: Job) -> None:
        """Does nothing for a job without a deadline."""
        if job.deadline is None:
            return
        heapq.heappush(self._heap, (job.deadline, next(self._order), job))
        if len(self._heap) > 2 * len(self._open) + 64:  # else jobs that ended early would stay until their deadline
            self._heap = [entry for entry in self._heap if entry[2] in self._open]
            heapq.heapify(self._heap)

    def passed(self, now: float) -> list[Job]:
        """The open jobs whose deadline is not after ``now``, the earliest first; they are forgotten."""
        jobs = []
        while self._heap and self._heap[0][0] <= now:
            job = heapq.heappop(self._heap)[2]
            if job in self._open:
                jobs.append(job)
        return jobs

    def seconds_left(self, now: float) -> float | None:
        """Until the next deadline; None when there is none."""
        return max(0.0, self._heap[0][0] - now) if self._heap else None
