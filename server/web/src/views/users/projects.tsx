/** The list of projects, and the move of experiments to another one. */

import { useState } from "preact/hooks";

import { get, patch, post, put, remove } from "../../api";
import { Ask, Dialog, Now, Question } from "../../dialog";
import { number } from "../../format";
import { useEvents, useLoaded } from "../../live";
import { Cell, Problem, Raw, Select, Table, Time } from "../../parts";
import type { Project, ProjectMembers, User } from "../../resources";
import { projectAddress, useChoice } from "../../route";
import { type Column, Heads, sorted, useOrder } from "../../sorting";
import { Allowed } from "./access";

/** A project with a number, by which rows of equal values are ordered. */
interface Row extends Project {
  id: number;
}

const read = () => get<{ projects: Project[] }>("/projects").then(({ projects }) => projects.map((row, id): Row => ({ ...row, id })));
const seconds = (time: string | null): number | null => (time === null ? null : Date.parse(time));

const OWNER = "owner";
const COLUMNS: Column<Row>[] = [
  { name: "project", value: (row) => row.name },
  { name: OWNER, value: (row) => row.owner },
  { name: "experiments", value: (row) => row.experiments, falling: true },
  { name: "not finished", value: (row) => row.unfinished, falling: true },
  { name: "models", value: (row) => row.models, falling: true },
  { name: "last submission", value: (row) => seconds(row.last_experiment_at), falling: true },
];

export function Projects() {
  const list = useLoaded("projects", read);
  const [archived, setArchived] = useChoice("archived");
  const [order, sort] = useOrder(COLUMNS, { name: "last submission", falling: true });
  useEvents("/events", ({ experiments, reload }) => void ((reload || experiments.size > 0) && list.reload()), 2000);
  if (list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const hidden = list.value.filter((row) => row.archived).length;
  const rows = sorted(list.value.filter((row) => archived !== "" || !row.archived), COLUMNS, order);
  const heads = COLUMNS.filter(({ name }) => name !== OWNER || rows.some((row) => row.owner !== null));
  return (
    <>
      {list.error && <Problem text={list.error} />}
      <header class="title">
        <h1>Projects</h1>
        <div class="actions">
          <Allowed>
            <New done={list.reload} />
          </Allowed>
          <Raw path="/projects" />
        </div>
      </header>
      {hidden > 0 && (
        <div class="choice">
          <label>
            <input type="checkbox" checked={archived !== ""} onChange={(e) => setArchived(e.currentTarget.checked ? "1" : "")} /> Show archived ({hidden})
          </label>
        </div>
      )}
      <Table
        head={
          <>
            <Heads columns={heads} order={order} sort={sort} />
            <th aria-label="actions" />
          </>
        }
      >
        {rows.map((row) => (
          <Line key={row.name} row={row} owned={heads.length === COLUMNS.length} done={list.reload} />
        ))}
      </Table>
    </>
  );
}

function Line({ row, owned, done }: { row: Project; owned: boolean; done: () => void }) {
  const change = (body: Partial<Project>) => patch(`/projects/${row.name}`, body).then(done);
  return (
    <tr class={row.archived ? "gone" : ""}>
      <Cell kind="name">
        <a href={projectAddress(row.name)}>{row.name}</a> {row.archived && <span class="badge">archived</span>}
        {row.restricted && <span class="badge">members only</span>}
        {row.description && <div class="muted">{row.description}</div>}
        {row.notes && (
          <details>
            <summary class="muted">Notes</summary>
            <p class="notes">{row.notes}</p>
          </details>
        )}
      </Cell>
      {owned && <Cell name={OWNER}>{row.owner}</Cell>}
      <Cell name="experiments" kind="figure">
        {number(row.experiments)}
      </Cell>
      <Cell name="not finished" kind="figure">
        {number(row.unfinished)}
      </Cell>
      <Cell name="models" kind="figure">
        {number(row.models)}
      </Cell>
      <Cell name="last submission" kind="figure">
        <Time at={row.last_experiment_at} />
      </Cell>
      <Cell kind="acts">
        <Allowed owner={row.owner}>
          <Edit row={row} change={change} />{" "}
          {owned && row.name !== "default" && <Members row={row} change={change} />}{" "}
          {row.archived ? (
            <Now act={() => change({ archived: false })}>unarchive</Now>
          ) : (
            row.name !== "default" && (
              <Ask act={() => change({ archived: true })} title={`archive project ${row.name}?`} ask="It accepts no new experiments and models. Its experiments stay, and running trials continue.">
                archive
              </Ask>
            )
          )}
        </Allowed>
      </Cell>
    </tr>
  );
}

function Edit({ row, change }: { row: Project; change: (body: Partial<Project>) => Promise<unknown> }) {
  const [open, setOpen] = useState(false);
  const [description, setDescription] = useState("");
  const [notes, setNotes] = useState("");
  const changes = { ...(description !== row.description && { description }), ...(notes !== row.notes && { notes }) };
  return (
    <>
      <button type="button" onClick={() => (setDescription(row.description), setNotes(row.notes), setOpen(true))}>
        edit
      </button>
      {open && (
        <Question title={`edit project ${row.name}`} deed="save" act={() => change(changes)} close={() => setOpen(false)}>
          <label class="field">
            Description
            <input value={description} onInput={(e) => setDescription(e.currentTarget.value)} />
          </label>
          <label class="field">
            Notes
            <textarea rows={8} value={notes} onInput={(e) => setNotes(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}

/** Who sees a restricted project. */
function Members({ row, change }: { row: Project; change: (body: Partial<Project>) => Promise<unknown> }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        members
      </button>
      {open && <MemberList row={row} change={change} close={() => setOpen(false)} />}
    </>
  );
}

function MemberList({ row, change, close }: { row: Project; change: (body: Partial<Project>) => Promise<unknown>; close: () => void }) {
  const path = `/projects/${row.name}/members`;
  const list = useLoaded(path, () => get<ProjectMembers>(path).then((answer) => answer.members));
  const users = useLoaded("users", () => get<{ users: User[] }>("/users").then((answer) => answer.users));
  const [user, setUser] = useState("");
  const members = list.value ?? [];
  const others = (users.value ?? []).filter(({ name, active }) => active && !members.some((member) => member.user === name));
  const error = list.error ?? users.error;
  return (
    <Dialog title={`members of ${row.name}`} close={close}>
      {error && <Problem text={error} />}
      <p>
        {row.restricted
          ? "Only these users and administrators see this project and what belongs to it."
          : "Everybody sees this project. Once it is restricted, only these users and administrators see it and what belongs to it."}
      </p>
      <Table head={["user", "actions"].map((name) => <th key={name}>{name}</th>)}>
        {members.map((member) => (
          <tr key={member.user}>
            <Cell kind="name">
              {member.user} {member.owner && <small class="muted">owner</small>}
            </Cell>
            <Cell kind="acts">{!member.owner && <Now act={() => remove(`${path}/${member.user}`).then(list.reload)}>remove</Now>}</Cell>
          </tr>
        ))}
      </Table>
      <p class="actions">
        <Select name="new member" value={user} options={[["", "Choose a user"], ...others.map(({ name }): [string, string] => [name, name])]} choose={setUser} />
        <Now busy={user === ""} act={() => put(`${path}/${user}`).then(() => (setUser(""), list.reload()))}>
          add
        </Now>
      </p>
      <p class="actions">
        {row.restricted ? (
          <Now act={() => change({ restricted: false })}>show to everybody</Now>
        ) : (
          <Now act={() => change({ restricted: true })}>restrict to members</Now>
        )}
        <button type="button" onClick={close}>
          Close
        </button>
      </p>
    </Dialog>
  );
}

function New({ done }: { done: () => void }) {
  const [open, setOpen] = useState(false);
  const [name, setName] = useState("");
  const [description, setDescription] = useState("");
  return (
    <>
      <button type="button" onClick={() => (setName(""), setDescription(""), setOpen(true))}>
        new project
      </button>
      {open && (
        <Question title="new project" deed="create" act={() => post("/projects", { name, description }).then(done)} close={() => setOpen(false)}>
          <label class="field">
            Name
            <input required value={name} onInput={(e) => setName(e.currentTarget.value.trim())} />
          </label>
          <label class="field">
            Description
            <input value={description} onInput={(e) => setDescription(e.currentTarget.value)} />
          </label>
        </Question>
      )}
    </>
  );
}

/** A button that moves experiments to another project. */
export function Move({ ids, done }: { ids: number[]; done: () => void }) {
  const [open, setOpen] = useState(false);
  return (
    <Allowed>
      <button type="button" onClick={() => setOpen(true)}>
        Move to project
      </button>
      {open && <MoveForm ids={ids} done={done} close={() => setOpen(false)} />}
    </Allowed>
  );
}

function MoveForm({ ids, done, close }: { ids: number[]; done: () => void; close: () => void }) {
  const list = useLoaded("projects", read);
  const [project, setProject] = useState("");
  const act = async () => {
    const failed: string[] = [];
    for (const id of ids) await patch(`/experiments/${id}`, { project }).catch((problem: Error) => failed.push(`experiment ${id}: ${problem.message}`));
    done();
    if (failed.length > 0) throw new Error(failed.join("\n"));
  };
  const options = (list.value ?? []).filter((row) => !row.archived).map(({ name }): [string, string] => [name, name]);
  return (
    <Question title={ids.length === 1 ? `move experiment ${ids[0]}` : `move ${number(ids.length)} experiments`} deed="move" act={project === "" ? async () => Promise.reject(new Error("choose a project")) : act} close={close}>
      {list.error && <Problem text={list.error} />}
      <label class="field">
        Project
        <Select name="project" value={project} options={[["", "Choose a project"], ...options]} choose={setProject} />
      </label>
      <p class="muted">The quota of the new project applies from now on.</p>
    </Question>
  );
}
