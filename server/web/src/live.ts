/** Values that follow the server: read once, then again whenever its event stream says so. */

import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError } from "./api";
import type { Experiment, Trial } from "./resources";

export interface Live<T> {
  value: T | null;
  error: string | null;
  reload: () => void;
  /** Apply the changes of an event to the loaded data. */
  update: (change: (old: T) => T) => void;
}

/** The error in place of a message when a sign-in is needed. */
export const LOGIN = "login";

/** The message of an error while reading; `LOGIN` if a sign-in is needed. */
export function messageOf(problem: unknown): string {
  if (problem instanceof ApiError && problem.status === 401) return LOGIN;
  // A TypeError is what `fetch` throws when the server does not respond.
  return problem instanceof TypeError ? "The server does not respond; retrying." : (problem as Error).message;
}

/** Read with `load` now, when `key` or `tick` changes, and at each `reload()`; one read at a time.
 *
 * What was read stays while it is read again, and when that fails; another `key` clears it.
 */
export function useLoaded<T>(key: string, load: () => Promise<T>, tick: number | string = 0): Live<T> {
  const [value, setValue] = useState<T | null>(null);
  const [error, setError] = useState<string | null>(null);
  const state = useRef({ busy: false, again: false, key });
  const reload = () => {
    const now = state.current;
    if (now.busy) {
      now.again = true;
      return;
    }
    now.busy = true;
    const asked = now.key;
    load()
      .then((read) => {
        if (asked !== now.key) return;
        setValue(read);
        setError(null);
      })
      .catch((problem: unknown) => {
        setError(messageOf(problem));
      })
      .finally(() => {
        now.busy = false;
        if (now.again) {
          now.again = false;
          latest.current();
        }
      });
  };
  const latest = useRef(reload);
  latest.current = reload;
  useEffect(() => {
    if (state.current.key !== key) setValue(null);
    state.current.key = key;
    latest.current();
  }, [key, tick]);
  const update = (change: (old: T) => T) => {
    setValue((old) => (old === null ? old : change(old)));
    if (state.current.busy) state.current.again = true; // what is being read may be older
  };
  return { value, error, reload: () => latest.current(), update };
}

/** What changed since the last call. */
export interface Changes {
  /** Kinds of events that came: experiment, trial, metric, checkpoint, log, cluster. */
  kinds: Set<string>;
  /** Things that changed, by id, as they are now; null for one that was deleted. */
  experiments: Map<number, Experiment | null>;
  trials: Map<number, Trial | null>;
  /** Events may have been missed: everything must be read again. */
  reload: boolean;
}

const none = (): Changes => ({ kinds: new Set(), experiments: new Map(), trials: new Map(), reload: false });

const KINDS = ["experiment", "trial", "metric", "checkpoint", "log", "cluster"];
const RETRY_MS = 3000;

/** Put rows that changed into a list; rows that are new come last. */
export function merge<T extends { id: number }>(old: T[], changed: Map<number, T | null>): T[] {
  if (changed.size === 0) return old;
  const rows = new Map(old.map((row) => [row.id, row]));
  for (const [id, row] of changed) {
    if (row === null) rows.delete(id);
    else rows.set(id, row);
  }
  return [...rows.values()];
}

/** Follow a stream, or none; call `changed` at most once every `pause` ms. Returns whether it is connected. */
export function useEvents(path: string | null, changed: (changes: Changes) => void, pause = 500): boolean {
  const [connected, setConnected] = useState(false);
  const callback = useRef(changed);
  callback.current = changed;
  useEffect(() => {
    if (path === null) return;
    let pending = none();
    let timer: number | undefined;
    let retry: number | undefined;
    let source: EventSource | undefined;
    const flush = () => {
      timer = undefined;
      const changes = pending;
      pending = none();
      callback.current(changes);
    };
    const note = (event: MessageEvent<string>) => {
      pending.kinds.add(event.type);
      if (event.type === "experiment" || event.type === "trial") {
        const row = JSON.parse(event.data) as { id: number; reload?: boolean; deleted?: boolean };
        if (row.reload) pending.reload = true;
        else {
          const rows: Map<number, unknown> = event.type === "trial" ? pending.trials : pending.experiments;
          rows.set(row.id, row.deleted ? null : row);
        }
      }
      timer ??= window.setTimeout(flush, pause);
    };
    const disconnect = () => {
      source?.close();
      source = undefined;
      window.clearTimeout(retry);
    };
    const connect = () => {
      disconnect();
      const opened = new EventSource(`/api/v1${path}`);
      source = opened;
      for (const kind of KINDS) opened.addEventListener(kind, note);
      opened.onopen = () => setConnected(true);
      opened.onerror = () => {
        setConnected(false);
        // The browser connects again by itself, except after an answer that is an error.
        if (opened.readyState === EventSource.CLOSED) retry = window.setTimeout(connect, RETRY_MS);
      };
    };
    // A browser keeps six connections to a server: tabs that nobody looks at must not hold them.
    const looked = () => (document.hidden ? disconnect() : connect());
    document.addEventListener("visibilitychange", looked);
    looked();
    return () => {
      document.removeEventListener("visibilitychange", looked);
      disconnect();
      window.clearTimeout(timer);
    };
  }, [path]);
  return connected;
}

/** Call `act` every `ms` milliseconds while the page is visible and `active`. */
export function useEvery(ms: number, act: () => void, active = true) {
  const callback = useRef(act);
  callback.current = act;
  useEffect(() => {
    if (!active) return;
    const timer = window.setInterval(() => document.hidden || callback.current(), ms);
    return () => window.clearInterval(timer);
  }, [active]);
}
