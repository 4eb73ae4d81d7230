import os
import time

import pytest

from mjax.data.workers import WORTH_A_WORKER, Workers, all_cores, useful_workers
from mjax.errors import RunError, UsageError


def double(number):
    time.sleep(0.01 * (number % 3))
    return 2 * number


def failing(number):
    if number == 3:
        raise UsageError("three is no good")
    return number


def dying(number):
    if number == 3:
        os._exit(9)
    return number


@pytest.fixture(scope="module")
def three():
    with Workers(3) as workers:
        yield workers


def test_results_come_in_the_order_of_the_items(three):
    assert list(three.map(double, range(20))) == list(range(0, 40, 2))


def test_items_are_drawn_as_they_are_needed(three):
    drawn = []
    results = three.map(double, (drawn.append(number) or number for number in range(100)))
    next(results)
    assert len(drawn) <= 7
    results.close()


def test_what_a_function_raises_is_raised_here(three):
    with pytest.raises(UsageError, match="three is no good"):
        list(three.map(failing, range(9)))


def test_a_worker_that_is_killed_is_noticed():
    with Workers(2) as workers, pytest.raises(RunError, match="one of 2 worker processes was killed"):
        list(workers.map(dying, range(9)))


def test_one_worker_is_this_process():
    with Workers(1) as workers:
        assert set(workers.map(lambda _: os.getpid(), range(3))) == {os.getpid()}


def test_no_workers_are_refused():
    with pytest.raises(UsageError, match="--workers is 0; it must be at least 1"):
        Workers(0)


def test_little_text_gets_one_worker_and_much_text_all_cores():
    assert useful_workers(None, 100) == 1
    assert useful_workers(None, 1000 * WORTH_A_WORKER) == all_cores()
    assert useful_workers(5, 100) == 5
