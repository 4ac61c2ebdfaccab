/** The address after `#` names the view, and how it is looked at:
 * `#/experiments/3/logs/7,9?level=ERROR` is the log of two trials, its errors only.
 *
 * Every choice that changes what is seen stands behind the `?`, so that it survives a reload and
 * can be sent to others.
 */

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";

export const TABS = ["curves", "trials", "search", "hyperparameters", "checkpoints", "logs", "configuration"] as const;
export type Tab = (typeof TABS)[number];

export interface Route {
  /** What is shown; an address that names nothing is said to. */
  page: "list" | "cluster" | "experiment" | "unknown";
  /** Of the experiment; 0 elsewhere. */
  id: number;
  /** Null where the address names none: the first that has something to show. */
  tab: Tab | null;
  /** Trials that were chosen; none stands for all. */
  trials: number[];
  /** How it is looked at. */
  choices: URLSearchParams;
}

const EXPERIMENT = /^\/experiments\/([1-9]\d{0,14})(?:\/([a-z]+)(?:\/(\d[\d,]*))?)?\/?$/;

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  const route: Route = { page: "unknown", id: 0, tab: null, trials: [], choices: new URLSearchParams(query) };
  if (path === "" || path === "/") return { ...route, page: "list" };
  if (/^\/cluster\/?$/.test(path)) return { ...route, page: "cluster" };
  const found = EXPERIMENT.exec(path);
  const tab = TABS.find((name) => name === found?.[2]) ?? null;
  if (!found || (found[2] && tab === null)) return route;
  const trials = (found[3] ?? "").split(",").filter(Boolean).map(Number);
  return { ...route, page: "experiment", id: Number(found[1]), tab, trials };
}

/** The address of a view; choices that were made about the same experiment are kept. */
export function address(id: number, tab: Tab | null = null, trials: number[] = []): string {
  const now = parse(window.location.hash);
  const query = now.id === id ? now.choices.toString() : "";
  const chosen = trials.length > 0 ? `/${trials.join(",")}` : "";
  const place = tab === null && chosen === "" ? "" : `/${tab ?? "curves"}${chosen}`;
  return `#/experiments/${id}${place}${query && `?${query}`}`;
}

/** Change choices in the address, without a step in the browser's history; null takes one away. */
export function choose(changes: Record<string, string | null>): void {
  const hash = window.location.hash || "#/";
  const { choices } = parse(hash);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) choices.delete(name);
    else choices.set(name, value);
  }
  const query = choices.toString();
  window.history.replaceState(null, "", `${hash.split("?")[0]}${query && `?${query}`}`);
  window.dispatchEvent(new Event("hashchange"));
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

export const Choices = createContext(new URLSearchParams());

/** A choice of the address, and how to change it; `usual` does not stand in the address. */
export function useChoice(name: string, usual = ""): [string, (value: string) => void] {
  const value = useContext(Choices).get(name) ?? usual;
  return [value, (next) => choose({ [name]: next === usual ? null : next })];
}
