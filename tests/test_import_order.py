"""Imports run one way through the packages of tower_train, and sessions are configured alike: read from the sources by
ast."""

import ast
import graphlib
import re

import jobs
import pytest

# From the top: a module may import what stands below it, and nothing above it.
PACKAGES = ("fronts", "bench", "run", "proof", "inference", "cluster", "run_dir", "graph", "data", "options")
VOCABULARY = set(
    "errors console config examples workload layers normalization initializers host files measures "
    "user_functions".split()
)
# What else the vocabulary may import.
OF_VOCABULARY = {"options", "data.arrays", "graph.batch_axis", "graph.collectives", "graph.context", "graph.xla"}


def module_names(root):
    """{module's name: path} of the packages of this repository."""
    paths = [path for package in ("tower_train", "cifar10") for path in sorted((root / package).rglob("*.py"))]
    return {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports(source, known):
    """The modules of `known` that a module's source imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "__version__"]
            found |= {name if name in known else node.module for name in names}
    return found & set(known)


def place(module):
    """The height at which a module stands, commands and programs above all of them; None in the vocabulary."""
    if module == "tower_train":  # the public names, by which the benchmark measures
        return place("tower_train.bench")
    package, *rest = module.split(".")
    if package == "tower_train" and rest[0] in VOCABULARY:
        return None
    is_listed = package == "tower_train" and rest[0] in PACKAGES
    return len(PACKAGES) - PACKAGES.index(rest[0]) if is_listed else len(PACKAGES) + 1


def is_upwards(module, imported):
    if place(module) is None:
        rest = imported.partition(".")[2]
        return place(imported) is not None and rest not in OF_VOCABULARY and rest.partition(".")[0] not in OF_VOCABULARY
    if imported == "cifar10" or imported.startswith("cifar10."):
        return not module.startswith("cifar10")
    return place(imported) is not None and place(imported) > place(module)


@pytest.fixture(scope="module")
def modules():
    return module_names(jobs.ROOT)


@pytest.fixture(scope="module")
def graph(modules):
    return {name: imports(path.read_text(), modules) - {name} for name, path in modules.items()}


def test_imports_run_downwards(graph):
    upwards = [f"{module} imports {other}" for module in graph for other in graph[module] if is_upwards(module, other)]
    assert not upwards, "\n".join(sorted(upwards))


def test_there_are_no_circles(graph):
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_no_module_unpickles_data(modules):
    """Unpickling runs whatever its author wants."""
    words = re.compile(r"^ *(import|from) (pickle|marshal|shelve|dill|cloudpickle|joblib)|allow_pickle=(?!False)", re.M)
    assert not [name for name, path in modules.items() if words.search(path.read_text())]
    assert words.search("    import pickle") and words.search("np.load(f, allow_pickle=True)")


# {module: why it may make a configuration that says nothing of GPUs}
OWN_CONFIGURATION = {
    "tower_train.graph.devices": "the one place",
    "tower_train.cluster.membership": "a copy of that",
    "tower_train.cluster.store": "a client of a server that runs already",
    "tower_train.cluster.program": "a copy of that of the devices",
    "tower_train.fronts.compat": "a copy of the process's",
    "tower_train.fronts.tf1.views": "of an old program, whose sessions are the only ones",
}
OPENERS = {"Session", "MonitoredTrainingSession", "SingularMonitoredSession", "ChiefSessionCreator"}


def test_every_session_has_a_configuration_of_the_devices_or_without_gpus(modules):
    """TensorFlow refuses two numberings of GPUs, and the first to use one decides whether its memory grows."""
    opened, others = 0, set()
    for module, path in modules.items():
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
