# Sourced by up, down and enter, which set $state (and up $bin). A namespace is known by the process
# that holds it open: $state/pids/NAME has its id.

cgroup=duplex-$(printf %s "$state" | sha256sum | cut -c1-8)

# The start time tells a process from a later one with the same id.
started() { sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -d' ' -f20; }

remember() { # remember NAME PID
  echo "$2" >"$state/pids/$1"
  [ "$1" != init ] || started "$2" >"$state/pids/init.started"
}

alive() {
  local pid
  pid=$(cat "$state/pids/init" 2>/dev/null) && [ -n "$pid" ] &&
    [ "$(started "$pid")" = "$(cat "$state/pids/init.started")" ]
}

child() { # child PID: its first child, once it has one
  local children
  for _ in $(seq 250); do
    children=$(cat "/proc/$1/task/$1/children" 2>/dev/null) || break
    if [ -n "$children" ]; then
      echo "${children%% *}"
      return
    fi
    sleep 0.02
  done
  echo "no child of $1" >&2
  return 1
}

on() { # on NAMESPACE COMMAND...: run it there
  local namespace=$1
  shift
  nsenter -t "$(cat "$state/pids/$namespace")" -m -n -u -p -- "$@"
}

spawn() { # spawn NAMESPACE[:pid] NAME COMMAND...: start it there (:pid: only in its PID namespace)
  local namespace=$1 name=$2 which='-m -n -u -p' target log
  shift 2
  [ "${namespace%:pid}" = "$namespace" ] || which=-p
  target=$(cat "$state/pids/${namespace%:pid}")
  log=$state/logs/$name.log
  # No substitution in this command: its process would be taken for the child.
  setsid nsenter -t "$target" $which -- "$@" </dev/null >>"$log" 2>&1 &
  remember "$name" "$(child $!)"
}

# unshare makes its mounts private only after the fork: whoever entered sooner could mount over the
# machine's folders. When the process has become pause, that is done.
settled() { # settled NAMESPACE
  local pid
  pid=$(cat "$state/pids/$1")
  for _ in $(seq 500); do
    [ "$(readlink "/proc/$pid/exe")" != "$bin/pause" ] || return 0
    sleep 0.01
  done
  echo "$1 did not start" >&2
  return 1
}

waitfor() { # waitfor WHAT COMMAND...: until the command succeeds, at most 60 s
  local what=$1
  shift
  for _ in $(seq 300); do
    ! "$@" >/dev/null 2>&1 || return 0
    sleep 0.2
  done
  echo "$what did not come up" >&2
  return 1
}
