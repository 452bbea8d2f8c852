"""Every session takes the GPUs as the process has them outside of sessions: TensorFlow refuses two numberings, and the
first to use a GPU decides whether its memory grows. Here the sources are read; test_fake_gpus.py asks TensorFlow."""

import ast

import jobs

# {module: why it may make a configuration that says nothing of GPUs}
OWN_CONFIGURATION = {
    "tower_train.graph.devices": "the one place",
    "tower_train.cluster.membership": "a copy of that",
    "tower_train.cluster.store": "a client of a server that runs already",
    "tower_train.cluster.program": "a copy of that of the devices",
    "tower_train.fronts.compat": "a copy of the process's",
    "tower_train.fronts.tf1.contrib": "not of a session",
    "tower_train.fronts.tf1.views": "of an old program, whose sessions are the only ones",
}
OPENERS = {"Session", "MonitoredTrainingSession", "SingularMonitoredSession", "ChiefSessionCreator"}


def test_every_session_has_a_configuration_of_the_devices_or_without_gpus():
    opened, others = 0, set()
    for path in sorted([*(jobs.ROOT / "tower_train").rglob("*.py"), *(jobs.ROOT / "cifar10").rglob("*.py")]):
        module = ".".join(path.relative_to(jobs.ROOT).with_suffix("").parts)
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call):
                name = getattr(call.func, "attr", getattr(call.func, "id", None))
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
                if name in OPENERS:
                    opened += 1
                    assert "config" in given or len(call.args) > 2, f"{module}:{call.lineno}: give it devices.place's"
                if name == "ConfigProto" and given.get("device_count") != "{'GPU': 0}":
                    others.add(module)
    assert opened > 10
    assert others == OWN_CONFIGURATION.keys(), "use devices.place, or give {'GPU': 0}"
