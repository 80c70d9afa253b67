"""Runs pyverbs' own test suite, and says as JSON how each of its tests ended.

usage: pyverbs_suite.py FOLDER DEVICE GID_INDEX [TEST ...]

FOLDER holds the suite as rdma-core has it: run_tests.py, __init__.py and the rest.
"""
import importlib.util
import json
import os
import sys
import unittest

folder, device, gid = sys.argv[1:4]
only = set(sys.argv[4:])
sys.path.insert(0, folder)
from args_parser import parser  # noqa: E402  (of the suite)

sys.argv[1:] = ["--dev", device, "--gid", gid]
spec = importlib.util.spec_from_file_location(
    "tests", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
tests = importlib.util.module_from_spec(spec)
sys.modules["tests"] = tests
spec.loader.exec_module(tests)
parser.parse_args()


def flat(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from flat(test)
        else:
            yield test


class Result(unittest.TestResult):
    ended = {}
    why = {}

    def say(self, test, how, why=""):
        # Of a test with several parts the worst counts.
        order = ["passed", "skipped", "failed"]
        before = self.ended.get(test.id(), "passed")
        self.ended[test.id()] = max(how, before, key=order.index)
        if how == "failed":
            self.why[test.id()] = why[-600:]

    def addSuccess(self, test):
        self.say(test, "passed")

    def addSkip(self, test, reason):
        self.say(test, "skipped")

    def addError(self, test, error):
        self.say(test, "failed", self._exc_info_to_string(error, test))

    addFailure = addError

    def addSubTest(self, test, subtest, error):
        if error:
            self.addError(test, error)


suite = unittest.TestSuite(
    test for test in flat(unittest.defaultTestLoader.loadTestsFromModule(tests))
    if not only or test.id() in only)
result = Result()
suite.run(result)
print("\n" + json.dumps({"ended": result.ended, "why": result.why}), flush=True)
# What a test left running must not hold up the end.
os._exit(0)
