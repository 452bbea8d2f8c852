# Sourced by scripts/train and scripts/test: makes an environment with this package, if there is none, and sets $python.
#
#   set_up EXTRAS   e.g. "" or "[test]"; with an NVIDIA driver CUDA's libraries come too
#   answer_help "$@"   before that: for --help, prints the comment at the head of the script and exits

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

fail() {
  printf '%s: error: %s\n' "$0" "$1" >&2
  exit 2
}

answer_help() {
  case " $* " in
    *' --help '* | *' -h '*)
      sed -n '2,/^set /s/^# \{0,1\}//p' "$0"
      exit 0
      ;;
  esac
}

find_python() {
  local candidate
  for candidate in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.10 python; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  fail "no Python 3.10 to 3.13 found (TensorFlow supports no others). Install one, or name it: PYTHON=/path/to/python $0"
}

set_up() {
  local extras=$1 environment stamp
  # WSL 2 lacks the file; tower_train/host.py checks the same.
  if [ -e "${NVIDIA_DRIVER:-/proc/driver/nvidia/version}" ] || [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]; then
    extras=${extras#[}
    extras="[gpu${extras:+,${extras%]}}]"
  fi
  if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
    environment=$VIRTUAL_ENV
  else
    environment=$root/.venv
  fi
  python=$environment/bin/python
  # The stamp is written last and says what is installed, so that an interrupted set-up is repeated.
  stamp=$environment/.tower_train${extras//[^a-z]/-}
  if [ -x "$python" ] && [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$root $(cksum <"$root/setup.py")" ]; then
    return
  fi
  if [ ! -x "$python" ]; then
    local base
    base=$(find_python) || exit
    echo "Making a virtual environment in $environment ..." >&2
    "$base" -c 'import venv, ensurepip' 2>/dev/null ||
      fail "$base has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv) and start again."
    "$base" -m venv "$environment" || fail "the virtual environment in $environment could not be made."
  fi
  echo "Installing tower_train$extras and what it needs (a minute or two, once) ..." >&2
  # compat installs a path, which a folder named tower_train, such as the clone's, does not hide
  "$python" -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat \
    --editable "$root$extras" >&2 ||
    fail "pip could not install tower_train$extras. Can this machine reach the package index?"
  printf '%s' "$root $(cksum <"$root/setup.py")" >"$stamp"
}
