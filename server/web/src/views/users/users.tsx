/** Users and their roles. */

import { useState } from "preact/hooks";

import { get, patch, post } from "../../api";
import { Ask, Now, Question } from "../../dialog";
import { useLoaded } from "../../live";
import { Cell, Problem, Raw, Select, Table, Time } from "../../parts";
import type { User, Whoami } from "../../resources";
import { useCaller } from "./access";
import { Administration } from "./admin";
import { Tokens } from "./tokens";

const ROLES: [string, string][] = [
  ["viewer", "viewer: reads"],
  ["member", "member: changes what they own"],
  ["admin", "admin: changes everything"],
];
const USER_HEADS = ["user", "role", "active", "created", ""];

export function Users() {
  const caller = useCaller();
  const list = useLoaded("users", () => get<{ users: User[] }>("/users").then((answer) => answer.users));
  if (caller === null || list.value === null) return list.error ? <Problem text={list.error} /> : <p class="muted">Loading…</p>;
  const admin = caller.role === "admin";
  return (
    <>
      {list.error && <Problem text={list.error} />}
      <header class="title">
        <h1>Users</h1>
        <div class="actions">
          {admin && <New done={list.reload} />}
          <Raw path="/users" />
        </div>
      </header>
      <Table head={USER_HEADS.map((name) => <th key={name} aria-label={name || "actions"}>{name}</th>)}>
        {list.value.map((user) => (
          <UserLine key={user.name} user={user} admin={admin} caller={caller} done={list.reload} />
        ))}
      </Table>
      <Tokens key={list.value.map(({ name, active }) => `${name} ${active}`).join()} users={admin ? list.value.map(({ name }) => name) : [caller.user]} />
      {admin && <Administration users={list.value.map(({ name }) => name)} />}
    </>
  );
}

interface UserLineProps {
  user: User;
  admin: boolean;
  caller: Whoami;
  done: () => void;
}

function UserLine({ user, admin, caller, done }: UserLineProps) {
  const change = (body: Partial<User>) => patch(`/users/${user.name}`, body).finally(done);
  return (
    <tr>
      <Cell kind="name">
        {user.name} {user.name === caller.user && <small class="muted">you</small>}
      </Cell>
      <Cell name="role">{admin && user.name !== "admin" ? <Role user={user} change={change} /> : user.role}</Cell>
      <Cell name="active">{user.active ? "yes" : "no"}</Cell>
      <Cell name="created" kind="figure">
        <Time at={user.created_at} />
      </Cell>
      <Cell kind="acts">
        {admin && user.name !== "admin" && user.active && (
          <Ask
            act={() => change({ active: false })}
            final
            title={`deactivate ${user.name}?`}
            ask="All tokens and browser sessions of this user are revoked. Experiments and models stay, and running trials continue."
          >
            deactivate
          </Ask>
        )}
        {admin && !user.active && <Now act={() => change({ active: true })}>activate</Now>}
      </Cell>
    </tr>
  );
}

function Role({ user, change }: { user: User; change: (body: Partial<User>) => Promise<unknown> }) {
  const [next, setNext] = useState<string | null>(null);
  return (
    <>
      <Select name={`role of ${user.name}`} value={next ?? user.role} options={ROLES.map(([role]) => [role, role])} choose={setNext} />
      {next !== null && next !== user.role && (
        <Question title={`change the role of ${user.name}?`} deed="change" act={() => change({ role: next as User["role"] })} close={() => setNext(null)}>
          <p>
            {user.role} → <b>{ROLES.find(([role]) => role === next)?.[1]}</b>. It applies to the next request.
          </p>
        </Question>
      )}
    </>
  );
}

function New({ done }: { done: () => void }) {
  const [open, setOpen] = useState(false);
  const [name, setName] = useState("");
  const [role, setRole] = useState("member");
  const act = () => post("/users", { name, role }).then(done);
  return (
    <>
      <button type="button" onClick={() => (setName(""), setRole("member"), setOpen(true))}>
        new user
      </button>
      {open && (
        <Question title="new user" deed="add" act={act} close={() => setOpen(false)}>
          <label class="field">
            Name
            <input required value={name} onInput={(e) => setName(e.currentTarget.value.trim())} />
          </label>
          <label class="field">
            Role
            <Select name="role" value={role} options={ROLES} choose={setRole} />
          </label>
          <p class="muted">
            Then create a token: <code>zerolab token create --user {name || "NAME"} --expires 30d</code>
          </p>
        </Question>
      )}
    </>
  );
}
