"""Every session takes the GPUs as the process has them outside of sessions: TensorFlow refuses two numberings, and the
first to use a GPU decides whether its memory grows. Here the sources are read; test_fake_gpus.py asks TensorFlow."""

import ast

import jobs

# {module: why it may make a configuration that says nothing of GPUs}
OWN_CONFIGURATION = {
    "tower_train.graph.devices": "the one place",
    "tower_train.cluster.membership": "a copy of that",
    "tower_train.cluster.board": "a client of a server that runs already",
    "tower_train.fronts.program": "a copy of that of the devices",
}
OPENERS = {"Session", "MonitoredTrainingSession", "SingularMonitoredSession", "ChiefSessionCreator"}


def _calls():
    """(module, name of what is called, call) of everything that the package calls."""
    for package in ("tower_train", "cifar10"):
        for path in sorted((jobs.ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(jobs.ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                    yield module, getattr(node.func, "attr", getattr(node.func, "id", None)), node


def test_no_session_is_opened_without_a_configuration():
    opened = [(module, call) for module, name, call in _calls() if name in OPENERS]
    assert len(opened) > 10
    for module, call in opened:
        has_config = any(keyword.arg == "config" for keyword in call.keywords) or len(call.args) > 2
        assert has_config, f"{module}:{call.lineno}: give the session the configuration of devices.place"


def test_configurations_come_from_the_devices_or_have_no_gpu():
    others = set()
    for module, name, call in _calls():
        if name == "ConfigProto":
            counts = [ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg == "device_count"]
            others |= {module} if counts != ["{'GPU': 0}"] else set()
    assert others == OWN_CONFIGURATION.keys(), "use devices.place, or add {'GPU': 0}"
