/** The address after `#` names the view: `#/experiments/3/logs/7,9` is the log of two trials. */

import { useEffect, useState } from "preact/hooks";

export const TABS = ["curves", "trials", "checkpoints", "logs", "configuration"] as const;
export type Tab = (typeof TABS)[number];

export interface Route {
  /** Experiment; null for the list of all. */
  id: number | null;
  tab: Tab;
  /** Trials that were chosen; none stands for all. */
  trials: number[];
}

export function parse(hash: string): Route {
  const found = /^#\/experiments\/(\d+)(?:\/([a-z]+))?(?:\/([\d,]+))?/.exec(hash);
  const tab = TABS.find((name) => name === found?.[2]) ?? "curves";
  const trials = (found?.[3] ?? "").split(",").filter(Boolean).map(Number);
  return { id: found ? Number(found[1]) : null, tab, trials };
}

export function address(id: number, tab: Tab = "curves", trials: number[] = []): string {
  return `#/experiments/${id}/${tab}${trials.length > 0 ? `/${trials.join(",")}` : ""}`;
}

export function useRoute(): Route {
  const [hash, setHash] = useState(window.location.hash);
  useEffect(() => {
    const changed = () => setHash(window.location.hash);
    window.addEventListener("hashchange", changed);
    return () => window.removeEventListener("hashchange", changed);
  }, []);
  return parse(hash);
}
