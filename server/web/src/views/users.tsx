/** Users and roles, and API tokens: of oneself, or of everybody for an administrator. */

import { useState } from "preact/hooks";

import { get, patch, post, remove } from "../api";
import { Ask, Now, Question } from "../dialog";
import { useLoaded } from "../live";
import { Cell, Problem, Raw, Select, Table, Time } from "../parts";
import type { ApiToken, User, Whoami } from "../resources";

const ROLES: [string, string][] = [
  ["viewer", "viewer: reads"],
  ["member", "member: changes what they own"],
  ["admin", "admin: changes everything"],
];
const USER_HEADS = ["user", "role", "active", "created", ""];
const TOKEN_HEADS = ["token", "user", "purpose", "created", "expires", "last used", ""];

interface OfUser extends ApiToken {
  user: string;
}

/** The user of this browser. */
export const useCaller = (): Whoami | null => useLoaded("whoami", () => get<Whoami>("/whoami")).value;

async function readTokens(users: string[]): Promise<OfUser[]> {
  const lists = await Promise.all(users.map((user) => get<{ tokens: ApiToken[] }>(`/users/${user}/tokens`)));
  return lists.flatMap((list, at) => list.tokens.map((token) => ({ ...token, user: users[at]! })));
}

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

function Tokens({ users }: { users: string[] }) {
  const list = useLoaded("tokens", () => readTokens(users));
  return (
    <>
      <h2>Tokens</h2>
      {list.error && <Problem text={list.error} />}
      {list.value?.length === 0 && (
        <p class="muted">
          No tokens. <code>zerolab token create</code> creates one; a browser cannot.
        </p>
      )}
      {list.value !== null && list.value.length > 0 && (
        <Table head={TOKEN_HEADS.map((name) => <th key={name} aria-label={name || "actions"}>{name}</th>)}>
          {list.value.map((token) => (
            <TokenLine key={token.id} token={token} done={list.reload} />
          ))}
        </Table>
      )}
    </>
  );
}

function TokenLine({ token, done }: { token: OfUser; done: () => void }) {
  const act = () => remove(`/users/${token.user}/tokens/${token.id}`).then(done);
  const expired = token.expires_at !== null && Date.parse(token.expires_at) < Date.now();
  return (
    <tr>
      <Cell name="token" kind="figure">
        {token.id}
      </Cell>
      <Cell name="user">{token.user}</Cell>
      <Cell name="purpose">{token.name || "–"}</Cell>
      <Cell name="created" kind="figure">
        <Time at={token.created_at} />
      </Cell>
      <Cell name="expires" kind="figure">
        {token.expires_at === null ? "never" : expired ? <b class="warn">expired</b> : token.expires_at.slice(0, 10)}
      </Cell>
      <Cell name="last used" kind="figure">
        {token.last_used_at === null ? "never" : <Time at={token.last_used_at} />}
      </Cell>
      <Cell kind="acts">
        <Ask act={act} final title={`revoke token ${token.id} of ${token.user}?`} ask="Programs that use it and browsers that it signed in are refused at once.">
          revoke
        </Ask>
      </Cell>
    </tr>
  );
}
