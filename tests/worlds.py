# SPDX-License-Identifier: Apache-2.0
"""Environments of the tests."""

import os
import subprocess
import threading
import time


class Sum:
    """Numbers are added until the target is met."""

    def __init__(self):
        self.target = self.total = 0

    def reset(self, target=0, **columns):
        self.target, self.total, self.done, self.step_rewards = int(target), 0, False, []
        return f" Reach {target}."

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: What is added.
        """
        self.total += number
        self.step_rewards.append(-abs(self.target - self.total) / 10)
        self.done = self.total == self.target
        return f"total {self.total}"

    async def wait(self, seconds: float = 0.0) -> dict:
        """Waits.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return {"waited": seconds, "by": None}

    def get_reward(self):
        return float(self.done)


class TooFar(Exception):
    def __init__(self, number, most):
        super().__init__(f"{number} is more than {most}")


class Rough(Sum):
    """Everything that a tool should not do."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()  # It cannot be pickled.
        self.error = TooFar(5, 3)  # It can, but its pickle cannot be read: it has one argument.

    def leave(self):
        """Ends its process."""
        os._exit(3)

    def fork(self):
        """Leaves a copy and a thread behind, and returns too much."""
        threading.Thread(target=time.sleep, args=(1000,)).start()
        return "in the copy" if os.fork() == 0 else "x" * 3_000_000

    def end_program(self):
        """Starts a program and ends it."""
        program = subprocess.Popen(["sleep", "100"])
        program.terminate()
        return str(program.wait())

    def tabulate(self):
        """Returns what JSON cannot hold."""
        return {("load", 3): 1.5}

    def contain(self):
        """Returns a list that holds itself."""
        values = [1]
        values.append(values)
        return values

    def fail(self):
        """Raises."""
        raise RuntimeError("no such load")

    def stop(self):
        """Raises what is no Exception."""
        raise SystemExit(1)


class Fetch:
    """Its parameters have names that this project's functions use too."""

    def reset(self, method="GET", **columns):
        return f" By {method}, with {', '.join(columns)}."

    def fetch(self, method: str, name: str) -> str:
        """Fetches.

        Args:
            method: How.
            name: What.
        """
        return f"{method} {name}"


class HalfCharacter(Sum):
    def reset(self, **columns):
        raise ValueError("no file days\udcff.csv")


class IntReset(Sum):
    def reset(self, **columns):
        return 3


class NoReset:
    def add(self, number: int):
        """Adds.

        Args:
            number: What is added.
        """


class Untyped(Sum):
    def multiply(self, number):
        """Multiplies."""


class Umlaut(Sum):
    def grösse(self):
        """A size."""


class TokenInDocstring(Sum):
    def stop(self) -> str:
        """Ends with <|call|>."""


class NoTool:
    def reset(self):
        pass


class DoneMethod(Sum):
    def done(self):
        """Whether it is done."""


class Late(Sum):
    def get_reward(self):
        time.sleep(100)


class TextReward(Sum):
    def get_reward(self):
        return "good"


class Tally:
    """TRL's contract alone: numbers are added, and what comes closest to the target is best."""

    def reset(self, prompt, target):
        self.target, self.total = int(target), 0
        return f" Reach {target}."

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: What is added.
        """
        if number > 50:
            raise ValueError("too much")
        self.total += number
        return f"total {self.total}"

    def get_reward(self) -> float:
        return -abs(self.target - self.total) / 10


class Paid(Tally):
    """Each call is paid too."""

    def reset(self, prompt, target):
        self.step_rewards = []
        return super().reset(prompt, target)

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: What is added.
        """
        text = super().add(number)
        self.step_rewards.append(number / 10)
        return text


class LatePaid(Tally):
    """Its list begins with the first call."""

    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: What is added.
        """
        self.step_rewards = [number / 10]
        return super().add(number)


class Unjudged(Tally):
    """Only some episodes can be scored."""

    def get_reward(self):
        return None if self.total != self.target else 1.0


def few_digits(completions, environments, **columns):
    return [float(environment.total < 10) for environment in environments]


def polite(completions, **columns):
    return [float(message["content"].startswith("Done")) for (message,) in completions]


class Unpaid:
    """It has no reward."""

    def reset(self, **columns):
        pass

    def look(self) -> str:
        """Looks."""
        return "nothing"


def fails(completions, **columns):
    raise KeyError("level")


class Counted(Sum):
    """It counts its episodes in a file."""

    def reset(self, target, count, **columns):
        super().reset(target)
        with open(count, "a") as file:
            file.write("x")
            return f" Episode {file.tell()}."


class Flaky(Sum):
    """Its first process ends in its first reset."""

    def reset(self, target, marker, **columns):
        if not os.path.exists(marker):
            open(marker, "w").close()
            os._exit(1)
        return super().reset(target)


class Slow(Sum):
    """Its reward takes a while."""

    def reset(self, target, reward_s, **columns):
        self.reward_s = reward_s
        return super().reset(target)

    def get_reward(self):
        time.sleep(self.reward_s)
        return super().get_reward()


class BrokenReset(Sum):
    def reset(self, **columns):
        return self.targets


class BrokenReward(Sum):
    def get_reward(self):
        return 1.0 / 0.0


class BrokenTool(Sum):
    def add(self, number: int) -> str:
        """Adds a number.

        Args:
            number: What is added.
        """
        return self.totals


class LongReset(Sum):
    def reset(self, target=0, **columns):
        super().reset(target)
        return " word" * 1000


def make_nothing():
    """A factory that forgets its `return`."""


class SlowReset(Sum):
    def reset(self, **columns):
        time.sleep(20)
