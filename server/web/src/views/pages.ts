/** Rows of a long list, read page by page as they are looked at. */

import { useEffect, useRef, useState } from "preact/hooks";

import { get } from "../api";
import { messageOf } from "../live";
import type { Trial, TrialPage } from "../resources";

const PAGE = 1000;
/** Rows that are read again by themselves when trials change; more are when someone asks for it. */
const FEW = 1000;
const AGAIN_MS = 3000;

export interface Pages {
  rows: Trial[];
  total: number | null;
  error: string | null;
  /** Whether rows may be missing or out of order by now. */
  stale: boolean;
  /** Read on until so many rows are there. */
  reach: (count: number) => void;
  again: () => void;
}

/** Trials in the order and under the conditions of `query`; `changed` are those that events reported. */
export function usePages(path: string, query: string, changed: Map<number, Trial | null>, tick: number): Pages {
  const [rows, setRows] = useState<Trial[]>([]);
  const [total, setTotal] = useState<number | null>(null);
  const [error, setError] = useState<string | null>(null);
  const [stale, setStale] = useState(false);
  const state = useRef({ asked: 0, wanted: PAGE, after: null as string | null, busy: false, have: 0, timer: 0 });

  const readOn = async (turn: number, fresh: boolean) => {
    const now = state.current;
    now.busy = true;
    let found: Trial[] = fresh ? [] : rowsNow.current;
    let after = fresh ? null : now.after;
    try {
      do {
        const cursor: string = after === null ? "" : `&after=${encodeURIComponent(after)}`;
        const page: TrialPage = await get(`${path}/trials?limit=${PAGE}${query}${cursor}`);
        if (turn !== now.asked) return;
        const known = new Set(found.map((trial) => trial.id)); // one may have moved between two pages
        found = [...found, ...page.trials.filter((trial) => !known.has(trial.id))];
        after = page.next_after;
        now.after = after;
        now.have = found.length;
        setTotal(page.total);
        setError(null);
        if (!fresh || after === null || found.length >= now.wanted) setRows(found);
      } while (after !== null && found.length < now.wanted);
    } catch (problem) {
      if (turn !== now.asked) return;
      setError(messageOf(problem));
    } finally {
      if (turn === now.asked) now.busy = false;
    }
  };
  const rowsNow = useRef(rows);
  rowsNow.current = rows;
  const start = (wanted: number) => {
    const now = state.current;
    now.asked += 1;
    now.wanted = wanted;
    setStale(false);
    void readOn(now.asked, true);
  };
  useEffect(() => {
    start(PAGE);
    return () => {
      state.current.asked += 1;
      window.clearTimeout(state.current.timer);
    };
  }, [path, query]);
  useEffect(() => {
    if (tick === 0) return;
    setRows((old) => old.filter((row) => changed.get(row.id) !== null).map((row) => changed.get(row.id) ?? row));
    if (state.current.have > FEW) return setStale(true);
    window.clearTimeout(state.current.timer);
    state.current.timer = window.setTimeout(() => start(Math.max(PAGE, state.current.have)), AGAIN_MS);
  }, [tick]);
  const reach = (count: number) => {
    const now = state.current;
    if (count <= now.wanted && (now.busy || now.have >= count)) return;
    now.wanted = Math.max(now.wanted, count);
    if (!now.busy && now.after !== null && now.have < count) void readOn(now.asked, false);
  };
  return { rows, total, error, stale, reach, again: () => start(Math.max(PAGE, state.current.have)) };
}
