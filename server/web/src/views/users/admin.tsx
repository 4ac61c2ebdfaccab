/** What only administrators see: the server, storage by project, notification channels and the audit log. */

import { useState } from "preact/hooks";

import { get, post, remove } from "../../api";
import { Ask, Dialog, Failure, Now, Question } from "../../dialog";
import { bytes, number } from "../../format";
import { useLoaded } from "../../live";
import { Cell, Copy, Facts, Problem, Raw, Select, Table, Time } from "../../parts";
import type { AuditEntry, AuditPage, Channel, ChannelAnswer, Info } from "../../resources";

const heads = (names: string[]) => names.map((name) => <th key={name} aria-label={name || "actions"}>{name}</th>);

export function Administration({ users }: { users: string[] }) {
  return (
    <>
      <Server />
      <Storage />
      <Channels />
      <Audit users={users} />
    </>
  );
}

function Server() {
  const info = useLoaded("info", () => get<Info>("/info"));
  if (info.value === null) return info.error ? <Problem text={info.error} /> : null;
  const { version, database, home, started_at, cluster } = info.value;
  return (
    <>
      <h2>Server</h2>
      <Facts
        rows={[
          ["version", version],
          ["database", database],
          ["data directory", home],
          ["started", <Time at={started_at} />],
          ["agents", <a href="#/cluster">{number(cluster.agents)}</a>],
          ["slots", `${number(cluster.free_slots)} of ${number(cluster.slots)} free`],
        ]}
      />
    </>
  );
}

interface Used {
  name: string;
  experiments: number;
  slot_hours: number;
  disk_bytes: number;
}

const BY: [string, string][] = [
  ["project", "by project"],
  ["user", "by user"],
  ["label", "by label"],
  ["pool", "by pool"],
];

function Storage() {
  const [by, setBy] = useState("project");
  const list = useLoaded(by, () => get<{ month: string; usage: Used[] }>(`/usage?by=${by}`));
  return (
    <>
      <header class="title">
        <h2>Usage</h2>
        <span>
          <Select name="usage" value={by} options={BY} choose={setBy} /> <Raw path={`/usage?by=${by}`} />
        </span>
      </header>
      {list.error && <Problem text={list.error} />}
      {list.value?.usage.length === 0 && <p class="muted">No experiments yet.</p>}
      {list.value !== null && list.value.usage.length > 0 && (
        <Table head={heads([by, "disk", `slot hours in ${list.value.month}`, "experiments with slots"])}>
          {list.value.usage.map((row) => (
            <tr key={row.name}>
              <Cell kind="name">{row.name || "–"}</Cell>
              <Cell name="disk" kind="figure">
                {bytes(row.disk_bytes)}
              </Cell>
              <Cell name="slot hours" kind="figure">
                {number(row.slot_hours)}
              </Cell>
              <Cell name="experiments" kind="figure">
                {number(row.experiments)}
              </Cell>
            </tr>
          ))}
        </Table>
      )}
    </>
  );
}

function Channels() {
  const list = useLoaded("channels", () => get<{ channels: Channel[] }>("/notification-channels").then((answer) => answer.channels));
  return (
    <>
      <header class="title">
        <h2>Notification channels</h2>
        <span class="actions">
          <NewChannel done={list.reload} /> <Raw path="/notification-channels" />
        </span>
      </header>
      {list.error && <Problem text={list.error} />}
      {list.value?.length === 0 && <p class="muted">No channels.</p>}
      {list.value !== null && list.value.length > 0 && (
        <Table head={heads(["channel", "kind", "events", "experiments", "waiting", "failed", "last sent", ""])}>
          {list.value.map((channel) => (
            <ChannelLine key={channel.name} channel={channel} done={list.reload} />
          ))}
        </Table>
      )}
    </>
  );
}

/** About which experiments a channel gets messages. */
function experimentsOf({ all_experiments, user, project }: Channel): string {
  if (all_experiments) return "all";
  return [user && `of ${user}`, project && `in ${project}`].filter(Boolean).join(" ") || "that name it";
}

function ChannelLine({ channel, done }: { channel: Channel; done: () => void }) {
  const path = `/notification-channels/${channel.name}`;
  const [tested, setTested] = useState("");
  const test = async () => {
    setTested("");
    const { delivered, error } = await post<{ delivered: boolean; error: string | null }>(`${path}/test`);
    done();
    if (!delivered) throw new Error(error ?? "not delivered");
    setTested("delivered");
  };
  return (
    <tr>
      <Cell kind="name">
        {channel.name}
        {channel.error && <div class="warn">{channel.error}</div>}
      </Cell>
      <Cell name="kind">{channel.kind}</Cell>
      <Cell name="events">{channel.events.join(", ")}</Cell>
      <Cell name="experiments">{experimentsOf(channel)}</Cell>
      <Cell name="waiting" kind="figure">
        {number(channel.pending)}
      </Cell>
      <Cell name="failed" kind="figure">
        {number(channel.failed)}
      </Cell>
      <Cell name="last sent" kind="figure">
        <Time at={channel.last_sent_at} />
      </Cell>
      <Cell kind="acts">
        <Now act={test}>test</Now> {tested}{" "}
        <Ask act={() => remove(path).then(done)} final title={`delete channel ${channel.name}?`} ask="Its messages are deleted, and experiments that name it send none there.">
          delete
        </Ask>
      </Cell>
    </tr>
  );
}

function NewChannel({ done }: { done: () => void }) {
  const [open, setOpen] = useState(false);
  const [name, setName] = useState("");
  const [url, setUrl] = useState("");
  const [kind, setKind] = useState("webhook");
  const [everything, setEverything] = useState(false);
  const [user, setUser] = useState("");
  const [project, setProject] = useState("");
  const [secret, setSecret] = useState<string | null>(null);
  const act = async () => {
    const scope = everything ? { all_experiments: true } : { user: user || null, project: project || null };
    const answer = await post<ChannelAnswer>("/notification-channels", { name, url, kind, ...scope });
    setSecret(answer.secret);
    setUrl("");
    done();
  };
  return (
    <>
      <button type="button" onClick={() => setOpen(true)}>
        new channel
      </button>
      {open && (
        <Question title="new notification channel" deed="create" act={act} close={() => setOpen(false)}>
          <label class="field">
            Name
            <input required value={name} onInput={(e) => setName(e.currentTarget.value.trim())} />
          </label>
          <label class="field">
            Kind
            <Select name="kind" value={kind} options={[["webhook", "webhook"], ["apprise", "apprise: Slack, mail, Teams and others"]]} choose={setKind} />
          </label>
          <label class="field">
            URL
            <input required value={url} autocomplete="off" onInput={(e) => setUrl(e.currentTarget.value.trim())} />
          </label>
          <label>
            <input type="checkbox" checked={everything} onChange={(e) => setEverything(e.currentTarget.checked)} /> All experiments, not only those that name it
          </label>
          {!everything && (
            <>
              <label class="field">
                All of the user (optional)
                <input value={user} onInput={(e) => setUser(e.currentTarget.value.trim())} />
              </label>
              <label class="field">
                All in the project (optional)
                <input value={project} onInput={(e) => setProject(e.currentTarget.value.trim())} />
              </label>
            </>
          )}
        </Question>
      )}
      {secret !== null && (
        <Dialog title={`secret of channel ${name}`} close={() => setSecret(null)}>
          <p>It signs the messages, and is not shown again.</p>
          <pre>{secret}</pre>
          <p class="actions">
            <Copy text={secret} />
            <button type="button" onClick={() => setSecret(null)}>
              Close
            </button>
          </p>
        </Dialog>
      )}
    </>
  );
}

const PAGE = 50;

function Audit({ users }: { users: string[] }) {
  const [user, setUser] = useState("");
  const path = `/audit?limit=${PAGE}${user && `&user=${encodeURIComponent(user)}`}`;
  return (
    <>
      <header class="title">
        <h2>Audit log</h2>
        <span>
          <Select name="changes of" value={user} options={[["", "All users"], ...users.map((name): [string, string] => [name, name])]} choose={setUser} /> <Raw path={path} />
        </span>
      </header>
      <AuditRows key={path} path={path} />
    </>
  );
}

function AuditRows({ path }: { path: string }) {
  const [older, setOlder] = useState<AuditEntry[]>([]);
  const [after, setAfter] = useState<string | null | undefined>(undefined);
  const [problem, setProblem] = useState("");
  const [busy, setBusy] = useState(false);
  const first = useLoaded(path, () => get<AuditPage>(path));
  const next = after === undefined ? (first.value?.next_after ?? null) : after;
  const read = () => {
    setBusy(true);
    setProblem("");
    get<AuditPage>(`${path}&after=${next}`)
      .then(
        (page) => {
          setOlder((rows) => [...rows, ...page.changes]);
          setAfter(page.next_after);
        },
        (failed: Error) => setProblem(failed.message),
      )
      .finally(() => setBusy(false));
  };
  const rows = [...(first.value?.changes ?? []), ...older];
  return (
    <>
      {first.error && <Problem text={first.error} />}
      {problem && <Failure text={problem} />}
      {rows.length === 0 ? (
        <p class="muted">{first.value === null ? "Loading…" : "No changes."}</p>
      ) : (
        <Table head={heads(["time", "user", "token", "action"])}>
          {rows.map((row) => (
            <tr key={row.id}>
              <Cell name="time" kind="figure">
                <Time at={row.time} />
              </Cell>
              <Cell name="user">{row.user}</Cell>
              <Cell name="token" kind="figure">
                {row.token_id || "–"}
              </Cell>
              <Cell name="action">
                <code>{row.action}</code>
              </Cell>
            </tr>
          ))}
        </Table>
      )}
      {next !== null && (
        <p>
          <button type="button" disabled={busy} onClick={read}>
            Show older
          </button>
        </p>
      )}
    </>
  );
}
