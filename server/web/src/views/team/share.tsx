/** Links that show experiments without an account. */

import { useEffect, useState } from "preact/hooks";

import { get, openLink, post, remove } from "../../api";
import { Ask, Dialog, Failure } from "../../dialog";
import { useLoaded } from "../../live";
import { Copy, Problem, Select } from "../../parts";
import type { NewShareAnswer, Share } from "../../resources";

/** Opens a link: the server sets a cookie, and the page starts again with what the link shows. */
export function Opened({ token }: { token: string }) {
  const [problem, setProblem] = useState("");
  useEffect(() => {
    openLink(token).then(
      ({ path }) => {
        window.location.replace(`#${path}`); // the token leaves the address and the history
        window.location.reload();
      },
      (failed: Error) => setProblem(failed.message),
    );
  }, []);
  return problem ? <Problem text={problem} /> : <p class="muted">Loading…</p>;
}

const DAY_S = 86_400;
const ENDS: [string, string][] = [
  [String(DAY_S), "1 day"],
  [String(7 * DAY_S), "7 days"],
  [String(30 * DAY_S), "30 days"],
];

/** A button that creates a link to what the page shows of some experiments. */
export function ShareButton({ ids }: { ids: number[] }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      <button type="button" disabled={ids.length === 0 || ids.length > MOST} title={`a link shows 1 to ${MOST} experiments`} onClick={() => setOpen(true)}>
        share
      </button>
      {open && <ShareDialog ids={ids} close={() => setOpen(false)} />}
    </>
  );
}

/** Most experiments of a link. */
const MOST = 100;

function ShareDialog({ ids, close }: { ids: number[]; close: () => void }) {
  const [name, setName] = useState("");
  const [expires, setExpires] = useState(String(7 * DAY_S));
  const [created, setCreated] = useState<NewShareAnswer | null>(null);
  const [problem, setProblem] = useState("");
  const list = useLoaded(`shares of ${ids[0]}`, () => get<{ shares: Share[] }>(`/shares?experiment=${ids[0]}`).then((answer) => answer.shares));
  const create = (event: Event) => {
    event.preventDefault();
    setProblem("");
    const path = window.location.hash.slice(1) || "/";
    post<NewShareAnswer>("/shares", { experiments: ids, name, path, expires_s: Number(expires) }).then(
      (answer) => (setCreated(answer), list.reload()),
      (failed: Error) => setProblem(failed.message),
    );
  };
  const url = created === null ? "" : window.location.origin + created.url;
  return (
    <Dialog title={ids.length === 1 ? `share experiment ${ids[0]}` : `share ${ids.length} experiments`} close={close}>
      <p class="muted">Whoever has the link sees results and the configuration, but no logs, code, checkpoints or comments, and can change nothing.</p>
      <form onSubmit={create}>
        <label class="field">
          Purpose
          <input maxLength={100} value={name} onInput={(e) => setName(e.currentTarget.value)} />
        </label>
        <label class="field">
          Valid for
          <Select name="valid for" value={expires} options={ENDS} choose={setExpires} />
        </label>
        {problem && <Failure text={problem} />}
        <button type="submit">create link</button>
      </form>
      {created !== null && (
        <p>
          <input readOnly aria-label="link" value={url} onFocus={(e) => e.currentTarget.select()} /> <Copy text={url} /> It is not shown again.
        </p>
      )}
      {list.error && <Problem text={list.error} />}
      {(list.value ?? []).map((share) => (
        <p key={share.id}>
          Link {share.id} {share.name} by {share.owner}, {share.valid ? `until ${share.expires_at.slice(0, 10)}` : "expired"}{" "}
          <Ask act={() => remove(`/shares/${share.id}`).then(list.reload)} final title={`revoke link ${share.id}?`} ask="The link stops working at once.">
            revoke
          </Ask>
        </p>
      ))}
      <p class="actions">
        <button type="button" onClick={close}>
          Close
        </button>
      </p>
    </Dialog>
  );
}
