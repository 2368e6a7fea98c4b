#!/usr/bin/env bash
# A node of a fleet on machines of your own. It runs until Ctrl-C or SIGTERM, and leaves no process.
#
#   ./node.sh head                 # on the first machine
#   ./node.sh join HEAD:6379       # on every other one, with ~/.ray/auth_token copied from the first
#
# Settings, by environment variables:
#   NODE_IP        address of this machine in the private network (default: Ray's guess)
#   PORT           of the head (6379)
#   CPUS           cores to offer (default: all; of the head 0, so that no environments are there)
#   SANDBOXES      workers with RayEnvs(resources={"sandbox": 1}), or --env-resources sandbox=1, that this machine
#                  may hold (default: none)
#   METRICS_PORT   of the Prometheus endpoint, which needs ray[default] (default: any)
set -euo pipefail

fail() { echo "node.sh: $*" >&2; exit 1; }
usage() { echo "usage: node.sh head | node.sh join HOST:PORT" >&2; exit 2; }

export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
options=(--block --disable-usage-stats)

case "${1:-}" in
  head)
    [ $# = 1 ] || usage
    options+=(--head "--port=${PORT:-6379}" --include-dashboard=false "--num-cpus=${CPUS:-0}")
    ;;
  join)
    [ $# = 2 ] || usage
    [[ $2 == *:* ]] || fail "expected HOST:PORT of the head, found $2"
    options+=("--address=$2")
    [ -z "${CPUS:-}" ] || options+=("--num-cpus=$CPUS")
    ;;
  *) usage ;;
esac

command -v ray > /dev/null || fail "expected Ray on this machine: pip install 'sandboxgym[ray]'"
python3 -c 'import sandboxgym, ray' 2> /dev/null || fail "expected sandboxgym on this machine: pip install 'sandboxgym[ray]'"

if [ "$1" = head ]; then
  (umask 077; ray get-auth-token --generate) > /dev/null
  [ ! -f "$HOME/.ray/auth_token" ] || chmod 600 "$HOME/.ray/auth_token"  # Ray itself lets everybody read it
elif [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -s "${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}" ]; then
  fail "expected the head's token in ${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}: copy it from there, readable for you only"
fi

[ -z "${NODE_IP:-}" ] || options+=("--node-ip-address=$NODE_IP")
[ -z "${METRICS_PORT:-}" ] || options+=("--metrics-export-port=$METRICS_PORT")
[ -z "${SANDBOXES:-}" ] || options+=("--resources={\"sandbox\": $SANDBOXES}")
exec ray start "${options[@]}"
