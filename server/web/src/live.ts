/** Values that follow the server: read once, then again whenever its event stream says so. */

import { useEffect, useRef, useState } from "preact/hooks";

import { ApiError } from "./api";

export interface Live<T> {
  value: T | null;
  error: string | null;
  reload: () => void;
}

/** Read with `load` now, when `key` changes, and at each `reload()`; never two reads at once. */
export function useLoaded<T>(key: string, load: () => Promise<T>): Live<T> {
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
        if (asked === now.key) {
          setValue(read);
          setError(null);
        }
      })
      .catch((problem: unknown) => {
        const needsLogin = problem instanceof ApiError && [401, 403].includes(problem.status);
        setError(needsLogin ? "login" : String((problem as Error).message));
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
  }, [key]);
  return { value, error, reload: () => latest.current() };
}

/** Call `changed` with the kinds of events that came, at most once every `pause` ms. */
export function useEvents(path: string, changed: (kinds: Set<string>) => void, pause = 700): boolean {
  const [connected, setConnected] = useState(false);
  const callback = useRef(changed);
  callback.current = changed;
  useEffect(() => {
    const source = new EventSource(`/api/v1${path}`);
    const pending = new Set<string>();
    let timer: number | undefined;
    const flush = () => {
      timer = undefined;
      const kinds = new Set(pending);
      pending.clear();
      callback.current(kinds);
    };
    const note = (event: MessageEvent) => {
      pending.add(event.type);
      timer ??= window.setTimeout(flush, pause);
    };
    for (const kind of ["experiment", "trial", "metric", "checkpoint", "log"]) {
      source.addEventListener(kind, note);
    }
    source.onopen = () => setConnected(true);
    source.onerror = () => setConnected(false); // the browser connects again by itself
    return () => {
      source.close();
      window.clearTimeout(timer);
    };
  }, [path]);
  return connected;
}
