/** Small pieces that several views show. */

import type { ComponentChildren, FunctionComponent } from "preact";
import { useEffect, useState } from "preact/hooks";

import { signIn, signInMethods } from "./api";
import { Now } from "./dialog";
import { ago, clock, number } from "./format";
import { LOGIN } from "./live";
import type { Experiment } from "./resources";

export const ENDED = ["COMPLETED", "CANCELED", "ERROR"];

/** What has a state, and may say why it has no result, or why it waits. */
interface Standing {
  state: string;
  /** Of an experiment: its trials, and how many of them have no result. */
  num_trials?: number;
  failed_trials?: number;
  canceled_trials?: number;
  result_problem?: string | null;
  waiting_reason?: string | null;
}

/** A state; an end without a result or with failed trials, and waiting, have separate colours. */
export function Badge({ of: row }: { of: Standing }) {
  const { state, result_problem, waiting_reason } = row;
  const words = state.replaceAll("_", " ").toLowerCase();
  if (state === "COMPLETED" && row.failed_trials) return <span class="badge empty">{`${words}, ${failures(row)}`}</span>;
  if (state === "COMPLETED" && result_problem) return <span class="badge empty">{words}, no result</span>;
  if (state === "ACTIVE" && waiting_reason) {
    return (
      <span class="badge queued" title={waiting_reason}>
        {words}, waiting
      </span>
    );
  }
  return <span class={`badge ${words.split(" ")[0]}`}>{words}</span>;
}

/** How many trials of an experiment completed and failed: `57 of 60, 3 failed`. */
function failures({ num_trials: all = 0, failed_trials: failed = 0, canceled_trials: canceled = 0 }: Standing): string {
  return `${number(all - failed - canceled)} of ${number(all)}, ${number(failed)} failed${canceled ? `, ${number(canceled)} canceled` : ""}`;
}

/** What went wrong with something, or why it waits: beside its name, cut to the width that there is. */
export function Trouble({ of: row }: { of: Standing & { error: string | null } }) {
  const problem = row.result_problem ?? row.error;
  const text = problem ?? (row.waiting_reason ? `waiting: ${row.waiting_reason}` : "");
  if (!text) return null;
  const kind = !problem ? "waiting" : row.state === "COMPLETED" ? "empty" : "problem";
  return (
    <small class={`reason ${kind}`} title={text.trim()}>
      {text.trim().split("\n")[0]}
    </small>
  );
}

export function Progress({ value }: { value: number }) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, value)));
  return (
    <span class="progress">
      <progress max={100} value={percent} aria-label="progress" />
      <small>{percent} %</small>
    </span>
  );
}

interface ProblemProps {
  text: string;
  /** Of its colour: an error, or a warning. */
  kind?: "bad" | "warned";
  children?: ComponentChildren;
}

export function Problem({ text, kind = "bad", children }: ProblemProps) {
  if (text === LOGIN) {
    return (
      <div class="notice" role="alert">
        <b>Not signed in.</b> Run <code>zerolab open</code> in a terminal and open the link that it prints. The link works
        once.
        <SignIn />
      </div>
    );
  }
  return (
    <div class={`notice ${kind}`} role="alert">
      {text.includes("\n") ? <pre tabIndex={0}>{text}</pre> : text} {children}
    </div>
  );
}

/** For users with a password; `zerolab open` needs none. */
function SignIn() {
  const [user, setUser] = useState("");
  const [password, setPassword] = useState("");
  const [problem, setProblem] = useState("");
  const [provider, setProvider] = useState<string | null>(null);
  useEffect(() => void signInMethods().then((methods) => setProvider(methods.oidc), () => {}), []);
  const submit = (event: Event) => {
    event.preventDefault();
    signIn(user, password).then(
      () => window.location.reload(),
      (failed: Error) => setProblem(failed.message),
    );
  };
  return (
    <>
      {provider && (
        <p>
          <a href="/login/oidc">Sign in with {provider}</a>
        </p>
      )}
      <details>
        <summary>Sign in with a password</summary>
        <form onSubmit={submit}>
          <label class="field">
            User
            <input required autocomplete="username" value={user} onInput={(e) => setUser(e.currentTarget.value.trim())} />
          </label>
          <label class="field">
            Password
            <input required type="password" autocomplete="current-password" value={password} onInput={(e) => setPassword(e.currentTarget.value)} />
          </label>
          {problem && <p class="warn">{problem}</p>}
          <button type="submit">Sign in</button>
        </form>
      </details>
    </>
  );
}

/** The first line of a problem, cut to the width that there is; the rest on demand. */
export function OneLine({ text, kind }: { text: string; kind: "problem" | "empty" | "waiting" }) {
  const lines = text.trim().split("\n");
  return (
    <details class={`trouble ${kind}`}>
      <summary title={lines[0]}>{lines[0]}</summary>
      <pre>{lines.join("\n")}</pre>
    </details>
  );
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A table; in a narrow window each row is a card, and its cells tell their names. */
export function Table({ head, children }: { head: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="table">
      <table class="rows">
        <thead>
          <tr>{head}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** A cell of a column; `name` is shown beside it where there is no room for the table's head. */
export function Cell({ name, kind, children }: { name?: string; kind?: string; children?: ComponentChildren }) {
  return (
    <td class={kind} data-name={name}>
      {children}
    </td>
  );
}

/** Put a text on the clipboard; browsers allow it by the newer way only on this machine and over TLS. */
async function copy(text: string): Promise<void> {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function Copy({ text }: { text: string }) {
  const [done, setDone] = useState("");
  return <Now act={() => copy(text).then(() => setDone(text))}>{done === text ? "copied" : "copy"}</Now>;
}

/** Hand a text or other content to the browser as a file. */
export function save(name: string, content: string | Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(typeof content === "string" ? new Blob([content], { type: "text/plain;charset=utf-8" }) : content);
  link.download = name;
  link.click();
  window.setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** What a thing is labelled with. */
export function Labels({ labels }: { labels: string[] }) {
  return (
    <>
      {labels.map((label) => (
        <span class="label" key={label}>
          {label}
        </span>
      ))}
    </>
  );
}

const REFRESH_MS = 30_000;
const refreshes = new Set<() => void>();
window.setInterval(() => document.hidden || refreshes.forEach((refresh) => refresh()), REFRESH_MS);

/** A moment as time ago; the tooltip has the local date and time. */
export function Time({ at }: { at: string | null }) {
  const [, draw] = useState(0);
  useEffect(() => {
    const refresh = () => draw((count) => count + 1);
    refreshes.add(refresh);
    return () => void refreshes.delete(refresh);
  }, []);
  if (at === null) return <>–</>;
  return (
    <time dateTime={at} title={clock(at)}>
      {ago(at)}
    </time>
  );
}

/** A choice between a few values. */
export function Select(props: { name: string; value: string; options: [string, string][]; choose: (value: string) => void }) {
  return (
    <select aria-label={props.name} value={props.value} onChange={(e) => props.choose(e.currentTarget.value)}>
      {props.options.map(([value, words]) => (
        <option value={value} key={value}>
          {words}
        </option>
      ))}
    </select>
  );
}

/** What a view shows, as the REST API answers it. */
export function Raw({ path }: { path: string }) {
  return (
    <a class="raw" href={`/api/v1${path}`} title={`GET /api/v1${path}`}>
      REST
    </a>
  );
}

interface LazyProps<P> {
  load: () => Promise<FunctionComponent<P>>;
  /** Properties of the view. */
  with: P;
  /** Whether nothing is shown while it is loaded. */
  quiet?: boolean;
}

/** A view that is loaded when it is first shown: most visits to the page need none of them. */
export function Lazy<P extends object>({ load, with: properties, quiet = false }: LazyProps<P>) {
  const [View, setView] = useState<FunctionComponent<P> | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    load().then(
      (loaded) => setView(() => loaded),
      () => setProblem("The view could not be loaded; reload the page."),
    );
  }, []);
  if (View !== null) return <View {...properties} />;
  if (problem) return <Problem text={problem} />;
  return quiet ? null : <p class="muted">Loading…</p>;
}

/** The fact that the retention of metrics removed values. */
export function removedValues({ metrics_expired_at: at, config }: Experiment): [string, ComponentChildren][] {
  if (at === null) return [];
  const { metric_retention_days: days } = (config["retention_policy"] ?? {}) as { metric_retention_days?: number | null };
  const when = days == null ? <Time at={at} /> : `${days} days after the end`;
  return [["curves", <span class="muted">most values were removed {when}; one of 1,024 steps is left</span>]];
}
