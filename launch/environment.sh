# SPDX-License-Identifier: Apache-2.0
# make_environment FOLDER WHAT: a virtual environment with WHAT installed from
# this repository; one that is complete is used again. Sourced with the
# repository as the working directory. PYTHON chooses the interpreter.

fail() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate candidates=(python3.12 python3.11 python3.13 python3.14
    python3 python)
  [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer is ${candidates[*]}; name one, such as
  PYTHON=/path/to/python3.12 bash $0"
}

make_environment() {
  local folder=$1 what=$2 python version done_file wanted
  python=$(find_python) || exit 1
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  # Written last: an environment without it was not finished. It names what
  # the environment was made from, so a change of any makes it anew.
  done_file="$folder/.complete"
  wanted="$version $what $(cksum setup.py diloco/numerics/blocks.c)"
  if [[ -f "$done_file" && "$(cat "$done_file")" == "$wanted" ]]; then
    return
  fi
  if [[ -e "$folder" && ! -f "$folder/pyvenv.cfg" &&
    ! -f "$folder/.unfinished" ]]; then
    fail "$folder exists and is no virtual environment"
  fi
  echo "Installing into $folder with Python $version (about a minute) ..."
  # Only what was made here is made anew; somebody's own is installed into.
  if [[ ! -e "$folder" || -f "$done_file" || -f "$folder/.unfinished" ]]; then
    # First the mark, which stays when the rest is interrupted.
    mkdir -p "$folder" && touch "$folder/.unfinished"
    find "$folder" -mindepth 1 -maxdepth 1 ! -name .unfinished -exec rm -rf {} +
    "$python" -m venv "$folder" ||
      fail "the venv module does not work; on Debian: apt install python3-venv"
  fi
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    -e "$what" || fail "pip could not install $what into $folder"
  # Else the disk goes on writing it for a while, and whatever else is written
  # then waits: a run that began at once closed no round for 18.7 s.
  sync
  echo "$wanted" >"$done_file"
  rm -f "$folder/.unfinished"
}
