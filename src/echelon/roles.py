"""A run with a parameter server on this machine: where its processes, the scheduler and the record meet."""

from __future__ import annotations

from pathlib import Path

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.launch.plan import LaunchPlan
from echelon.launch.roles import Role, RoleDeath, RoleRefused, RolesFailed, RoleWatch, run_roles
from echelon.observe.record import Recorder, read_records
from echelon.observe.report import write_report
from echelon.train.leased_check import settings_of
from echelon.train.served_start import SchedulerLine, prepare_roles, role_names

_ENTRIES = {
    "scheduler": "echelon.train.served:run_scheduler",
    "server": "echelon.train.served:run_server",
    "standby": "echelon.train.served:run_server",
    "worker": "echelon.train.leased:run_leased",
}


def run_leased_roles(config: RunConfig, plan: LaunchPlan, path: Path, record: Recorder) -> str:
    """Start scheduler, servers and workers of a parameter server; each is restarted alone."""
    line = SchedulerLine(prepare_roles(path))

    def on_death(death: RoleDeath, restarts_left: int) -> None:
        then = "it alone is started again" if restarts_left >= 0 else "no restarts are left"
        record.event("worker_died", f"{death}; {then}", role=death.name, host=death.host, pid=death.pid,
                     exit_code=death.exit_code)  # fmt: skip
        line.died(death.name, "died")

    def on_start(name: str, pid: int) -> None:
        record.write("process", role=name, pid=pid)

    environment = {"OMP_NUM_THREADS": str(plan.threads), "LOCAL_WORLD_SIZE": str(plan.workers)}
    roles = []
    for name, number in role_names(settings_of(config), plan.workers):
        kind = name.rstrip("0123456789")
        args = {"scheduler": (str(path),), "worker": (str(path), number, *plan.args[1:])}
        roles.append(Role(name, _ENTRIES[kind], args.get(kind, (str(path), name, number)),
                          leads=kind == "scheduler", shows=kind == "scheduler", environment=environment))  # fmt: skip
    try:
        stopped = run_roles(roles, plan.max_restarts, plan.log_dir, RoleWatch(on_death, line.stop, on_start))
        return "stopped" if stopped and line.status() != "completed" else line.status()
    except RoleRefused:
        reason = _last_event(path, "refused")
        record.write("end", status="refused", message=reason)
        write_report(path)
        raise UserError(reason) from None
    except RolesFailed:
        reason = _last_event(path, "worker_died")
        record.write("end", status="failed", message=reason)
        write_report(path)
        return "failed"
    finally:
        line.close()


def _last_event(path: Path, name: str) -> str:
    events = [r["message"] for r in read_records(path) if r["kind"] == "event" and r.get("name") == name]
    return events[-1] if events else f"the processes ended; see {path}/logs"
