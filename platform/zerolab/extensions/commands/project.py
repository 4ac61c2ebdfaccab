"""Command group ``zerolab project``."""

from typing import Annotated

import typer

from zerolab.cli.connection import complete_project
from zerolab.cli.groups import command_group
from zerolab.cli.output import (
    ArchivedToo,
    AsJson,
    age,
    print_archived_hint,
    print_done,
    print_fields,
    print_json,
    print_table,
    result,
)

__all__ = ["group"]

group = command_group("Group experiments and models by project.", panel="Results")

ProjectName = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the project.", autocompletion=complete_project),
]


@group.command("create")
def create_project(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Letters, digits and . _ - (at most 64)."),
    ],
    description: Annotated[str, typer.Option(help="Description.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a project, and print its name.

    Submit to it with `--project NAME`, or `project: NAME` in the experiment file.

    Example: zerolab project create vision --description "Image models"
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.create_project(name, description)
    if as_json:
        print_json(project)
    else:
        result(project.name)


@group.command("list")
def list_projects(archived: ArchivedToo = False, as_json: AsJson = False) -> None:
    """List the projects, sorted by name.

    Example: zerolab project list
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        projects = [item for item in client.projects() if archived or not item.archived]
    if as_json:
        print_json(projects)
        return
    print_archived_hint(projects, shown=archived)
    shared = any(item.owner for item in projects)
    is_any_restricted = any(item.restricted for item in projects)
    columns = ["name", "experiments", "unfinished", "models", "last submission", "description"]
    columns[1:1] = ["owner"] * shared + ["visible to"] * is_any_restricted
    rows = [
        (
            item.name,
            *[item.owner] * shared,
            *["members" if item.restricted else "everybody"] * is_any_restricted,
            item.experiments,
            item.unfinished,
            item.models,
            f"{age(item['last_experiment_at'])} ago" if item.last_experiment_at else "never",
            item.description,
        )
        for item in projects
    ]
    print_table(columns, rows, shortened={"description"})


@group.command("describe")
def describe(name: ProjectName, as_json: AsJson = False) -> None:
    """Show one project: description, notes, numbers of experiments and models.

    Example: zerolab project describe vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.project(name)
    if as_json:
        print_json(project)
        return
    print_fields(
        {
            "project": project.name,
            "owner": project.owner,
            "description": project.description,
            "notes": project.notes,
            "archived": "yes" if project.archived else None,
            "visible to": "members" if project.restricted else None,
            "experiments": f"{project.experiments}, {project.unfinished} unfinished",
            "models": project.models,
            "created": project["created_at"],
        }
    )


@group.command("change")
def change(
    name: ProjectName,
    description: Annotated[str | None, typer.Option(help="New description.")] = None,
    notes: Annotated[str | None, typer.Option(help="New notes.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the description or notes of a project.

    Example: zerolab project change vision --notes "baselines are labeled"
    """
    from zerolab.cli.connection import connect
    from zerolab.errors import ConfigError

    given = {"description": description, "notes": notes}
    changes = {key: value for key, value in given.items() if value is not None}
    if not changes:
        raise ConfigError("project change", ["give at least one of --description, --notes"])
    with connect() as client:
        project = client.patch_project(name, **changes)
    print_done(project, f"updated {' and '.join(changes)} of project {name}", as_json=as_json)


@group.command("archive")
def archive(name: ProjectName, as_json: AsJson = False) -> None:
    """Accept no new experiments and models in a project.

    Its experiments and models are kept, and running trials continue.

    Example: zerolab project archive vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.patch_project(name, archived=True)
    print_done(project, f"project {name} is archived", as_json=as_json)


@group.command("unarchive")
def unarchive(name: ProjectName, as_json: AsJson = False) -> None:
    """Accept experiments and models in a project again.

    Example: zerolab project unarchive vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.patch_project(name, archived=False)
    print_done(project, f"project {name} is no longer archived", as_json=as_json)


UserName = Annotated[str, typer.Argument(metavar="USER", help="Name of the user.")]


@group.command("restrict")
def restrict(name: ProjectName, as_json: AsJson = False) -> None:
    """Show a project only to its members and administrators.

    Others no longer see its experiments, models, metrics and logs. The owner is always a member.

    Example: zerolab project restrict vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.patch_project(name, restricted=True)
        members = client.project_members(name)
    names = ", ".join(member["user"] for member in members)
    message = f"project {name} is restricted to its members ({names}) and administrators"
    print_done(project, message, as_json=as_json)


@group.command("unrestrict")
def unrestrict(name: ProjectName, as_json: AsJson = False) -> None:
    """Show a project to everybody again.

    Example: zerolab project unrestrict vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        project = client.patch_project(name, restricted=False)
    print_done(project, f"everybody sees project {name}", as_json=as_json)


@group.command("members")
def list_members(name: ProjectName, as_json: AsJson = False) -> None:
    """List the members of a project.

    Example: zerolab project members vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        members = client.project_members(name)
    if as_json:
        print_json(members)
        return
    rows = [(member["user"], "owner" if member["owner"] else "member") for member in members]
    print_table(["user", "role in project"], rows)


@group.command("add-member")
def add_member(name: ProjectName, user: UserName, as_json: AsJson = False) -> None:
    """Add a member, who sees the project when it is restricted.

    Example: zerolab project add-member vision ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.add_project_member(name, user)
        members = client.project_members(name)
    print_done(members, f"user {user} is a member of project {name}", as_json=as_json)


@group.command("remove-member")
def remove_member(name: ProjectName, user: UserName, as_json: AsJson = False) -> None:
    """Remove a member, who no longer sees the project if it is restricted.

    Example: zerolab project remove-member vision ann
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        client.remove_project_member(name, user)
        members = client.project_members(name)
    print_done(members, f"user {user} is no longer a member of project {name}", as_json=as_json)


@group.command("move")
def move(
    experiments: Annotated[
        list[int], typer.Argument(metavar="EXPERIMENT...", help="Ids of the experiments.", min=1)
    ],
    project: Annotated[
        str,
        typer.Argument(
            metavar="PROJECT",
            help="Name of the project to move to.",
            autocompletion=complete_project,
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Move experiments to another project.

    Running trials continue. Quotas of the new project apply to their next start.

    Example: zerolab project move 3 4 vision
    """
    from zerolab.cli.connection import connect

    with connect() as client:
        moved = [client.patch_experiment(number, project=project) for number in experiments]
    if as_json:
        print_json(moved)
        return
    for experiment in moved:
        result(f"experiment {experiment.id} belongs to project {project}")
