# Sourced by launch/demo and launch/test: finds a Python, makes .venv, installs the package into it.
# After it, $ROOT is the checkout and $BIN the folder of the installed programs.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BIN=$ROOT/.venv/bin

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS" >&2; }
die() {
    printf 'error: %s\n' "$1" >&2
    printf 'hint: %s\n' "$2" >&2
    exit "${3:-7}"
}

# The first Python of at least 3.11, by name, then by what python3 is.
find_python() {
    local name
    for name in ${PYTHON:-} python3.14 python3.13 python3.12 python3.11 python3 python; do
        if "$name" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$name"
            return
        fi
    done
    die "no Python 3.11 or newer was found" \
        "install one (Debian, Ubuntu: apt install python3.11 python3.11-venv), or name it: PYTHON=/path/to/python $0"
}

# make_venv EXTRAS: .venv with the package in editable form; nothing happens when pyproject.toml is unchanged.
make_venv() {
    local stamp=$ROOT/.venv/.installed want python
    want="$1 $(cksum <"$ROOT/pyproject.toml")"
    if [ -x "$BIN/flashnext" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
        return
    fi
    python=$(find_python) || exit
    trap 'exit 130' INT # pip ends with 1 when it is interrupted: that is no trouble with the network
    step "Python environment in .venv ($("$python" --version 2>&1))"
    # an interrupted `-m venv` leaves a python without pip behind
    if ! "$BIN/python" -m pip --version >/dev/null 2>&1; then
        "$python" -m venv --clear "$ROOT/.venv" ||
            die "the virtual environment could not be made" "install the venv module (apt install python3-venv)"
    fi
    step "install flashnext$1"
    "$BIN/python" -m pip install --disable-pip-version-check --quiet --progress-bar on -e "$ROOT$1" ||
        die "pip could not install flashnext" "see pip's own message above; is the network reachable?" 5
    printf '%s\n' "$want" >"$stamp"
    trap - INT
}

need_tools() {
    local tool
    for tool in git "${CXX:-c++}"; do
        command -v "$tool" >/dev/null ||
            die "$tool was not found" "install it (Debian, Ubuntu: apt install git g++)"
    done
}
