"""The pool of threads.

1. Results come in the order of the items, however long each takes.
2. At most two results for each worker are computed ahead of the one that is taken, and items are taken as needed.
3. After an error, or when the caller stops, nothing runs any more.
4. One worker means the caller's own thread.
"""

import threading
import time

import numpy as np
import pytest

from unweight.format.parallel import Pool, available_processors


@pytest.fixture(params=[1, 2, 5])
def pool(request):
    with Pool(request.param) as pool:
        yield pool


class Boom(Exception):
    pass


def test_results_come_in_order(pool):
    waits = np.random.default_rng(0).random(40) / 500

    def work(i):
        time.sleep(waits[i])
        return i * i

    assert list(pool.map(work, range(40))) == [i * i for i in range(40)]


@pytest.mark.parametrize("items", [[], [7], [7, 8]], ids=str)
def test_few_items(pool, items):
    assert list(pool.map(str, items)) == [str(i) for i in items]


def test_a_pool_can_be_used_again_and_in_turns(pool):
    for _ in range(3):
        assert list(pool.map(abs, range(-5, 0))) == [5, 4, 3, 2, 1]
    first, second = pool.map(abs, range(10)), pool.map(abs, range(10, 20))
    assert [next(first), next(second), *first, *second] == [0, 10, *range(1, 10), *range(11, 20)]


def test_work_is_done_by_several_threads():
    barrier = threading.Barrier(3, timeout=10)  # breaks when fewer than three are there at once
    with Pool(3) as pool:
        assert len(list(pool.map(lambda _: barrier.wait(), range(3)))) == 3


def test_one_worker_is_the_caller():
    with Pool(1) as pool:
        assert set(pool.map(lambda _: threading.get_ident(), range(3))) == {threading.get_ident()}


def test_look_ahead_is_bounded(pool):
    taken = []

    def items():
        for i in range(100):
            taken.append(i)
            yield i

    ahead = 0 if pool.workers == 1 else 2 * pool.workers
    for done, i in enumerate(pool.map(abs, items())):
        assert i == done
        assert len(taken) <= min(100, done + max(1, ahead))
    assert len(taken) == 100


def test_nothing_is_computed_before_it_is_asked_for(pool):
    started = []
    results = pool.map(started.append, range(10))
    time.sleep(0.02)
    assert started == []
    results.close()


@pytest.mark.parametrize("bad", [0, 1, 7, 19])
def test_after_an_error_nothing_runs(pool, bad):
    running, started, lock = set(), [], threading.Lock()

    def work(i):
        with lock:
            running.add(i)
            started.append(i)
        try:
            if i == bad:
                raise Boom(i)
            time.sleep(0.005)
            return i
        finally:
            with lock:
                running.discard(i)

    done = []
    with pytest.raises(Boom, match=str(bad)):
        done.extend(pool.map(work, range(20)))

    assert running == set()
    count = len(started)
    time.sleep(0.02)
    assert len(started) == count, "work was started after the error"
    assert list(pool.map(abs, [1, 2])) == [1, 2]


def test_the_first_error_in_order_is_raised():
    second = threading.Event()

    def work(i):
        if i == 0:
            second.wait(10)
        elif i == 1:
            second.set()
        raise Boom(i)

    with Pool(2) as pool, pytest.raises(Boom, match="0"):
        list(pool.map(work, range(4)))


def test_when_the_caller_stops_nothing_runs(pool):
    running, lock = set(), threading.Lock()

    def work(i):
        with lock:
            running.add(i)
        time.sleep(0.005)
        with lock:
            running.discard(i)

    results = pool.map(work, range(1000))
    next(results)
    results.close()

    assert running == set()


def test_an_error_of_the_items_is_raised_and_nothing_runs(pool):
    running = set()

    def work(i):
        running.add(i)
        time.sleep(0.005)
        running.discard(i)

    def items():
        yield from range(5)
        raise Boom("items")

    with pytest.raises(Boom, match="items"):
        list(pool.map(work, items()))
    assert running == set()


@pytest.mark.parametrize("workers", [0, -1, -100])
def test_refuses_no_workers(workers):
    with pytest.raises(ValueError, match=f"workers is {workers}; it must be at least 1"):
        Pool(workers)


def test_default_is_the_processors_of_this_process():
    with Pool() as pool:
        assert pool.workers == available_processors() >= 1


def test_closing_ends_the_threads():
    before = threading.active_count()
    with Pool(4) as pool:
        list(pool.map(abs, range(8)))
        assert threading.active_count() > before
    assert threading.active_count() == before
