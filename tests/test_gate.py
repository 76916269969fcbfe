"""The thread that a device's engines share."""

import functools
import gc
import threading
import weakref

import pytest

from pyruntime.gate import DeviceThread, device_gate


@pytest.fixture
def gate():
    return DeviceThread("test")


def ask(gate, work):
    thread = threading.Thread(target=gate.run, args=(work,))
    thread.start()
    return thread


def test_work_runs_on_one_thread_in_the_order_of_asking(gate):
    running, begin, done = threading.Event(), threading.Event(), []
    threads = [ask(gate, lambda: running.set() or begin.wait())]
    running.wait()

    def work(number):
        done.append((number, threading.current_thread().name))

    for number in range(5):
        threads.append(ask(gate, functools.partial(work, number)))
        while gate._asked.qsize() <= number:  # the next one asks after this one
            pass
    begin.set()
    for thread in threads:
        thread.join()
    assert done == [(number, "device-test") for number in range(5)]


def test_what_work_raises_comes_back_and_the_next_one_runs(gate):
    with pytest.raises(SystemExit):
        gate.run(lambda: exec("raise SystemExit"))
    assert gate.run(lambda: 7) == 7


def test_nothing_of_a_step_outlives_it(gate):
    class Weights:
        pass

    weights = Weights()
    watch = weakref.ref(weights)
    gate.run(lambda held=weights: held and None)
    del weights
    gc.collect()
    assert watch() is None


def test_a_device_has_one_thread():
    assert device_gate("test:0") is device_gate("test:0")
    assert device_gate("test:0") is not device_gate("test:1")
