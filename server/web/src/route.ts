/** The address after `#` names the view, and how it is looked at:
 * `#/experiments/3/logs/7,9?level=ERROR` is the log of two trials, its errors only; `#/trials/7/runs`
 * are the runs of a trial, `#/compare/3,5` is two experiments beside each other, and `#/models/digits` a
 * model of the registry. `#/` is the list of projects if there are several, otherwise that of experiments.
 *
 * Every choice that changes what is seen stands behind the `?`, so that it survives a reload and
 * can be sent to others.
 */

import { createContext } from "preact";
import { useContext, useEffect, useState } from "preact/hooks";

export const TABS = ["curves", "trials", "search", "hyperparameters", "media", "checkpoints", "logs", "configuration", "code"] as const;
export type Tab = (typeof TABS)[number];

/** What a share link shows of an experiment or a trial. */
export const SHARED_TABS: string[] = ["curves", "trials", "search", "hyperparameters", "media"];

export const TRIAL_TABS = ["curves", "hyperparameters", "media", "checkpoints", "logs", "runs", "engine"] as const;
export type TrialTab = (typeof TRIAL_TABS)[number];

interface Plain {
  /** What is shown; an address that names nothing is said to. */
  page: "home" | "list" | "projects" | "cluster" | "models" | "users" | "unknown";
}

interface OfLink {
  page: "shared";
  /** Token of the share link. */
  token: string;
}

interface OfModel {
  page: "model";
  name: string;
}

/** In all: a tab is null where the address names none; the first that has something to show. */
export interface OfExperiment {
  page: "experiment";
  id: number;
  tab: Tab | null;
  /** Trials that were chosen; none means all. */
  trials: number[];
}

interface OfTrial {
  page: "trial";
  id: number;
  tab: TrialTab | null;
}

interface OfSeveral {
  page: "compare";
  /** Of experiments, in the order of the address. */
  ids: number[];
}

/** What is looked at, and how. */
export type Route = (Plain | OfLink | OfModel | OfExperiment | OfTrial | OfSeveral) & { choices: URLSearchParams };

const NUMBER = String.raw`[1-9]\d{0,14}`;
const EXPERIMENT = new RegExp(String.raw`^/experiments/(${NUMBER})(?:/([a-z]+)(?:/(\d[\d,]*))?)?/?$`);
const TRIAL = new RegExp(String.raw`^/trials/(${NUMBER})(?:/([a-z]+))?/?$`);
const LINK = /^\/shared\/([\w-]+)\/?$/;
const MODEL = /^\/models\/([A-Za-z0-9][\w.-]{0,127})\/?$/;
const SEVERAL = new RegExp(String.raw`^/compare/(${NUMBER}(?:,${NUMBER})*)?/?$`);

export function parse(hash: string): Route {
  const [path = "", query = ""] = hash.replace(/^#/, "").split("?", 2);
  return { ...shown(path), choices: new URLSearchParams(query) };
}

function shown(path: string): Plain | OfLink | OfModel | OfExperiment | OfTrial | OfSeveral {
  if (path === "" || path === "/") return { page: "home" };
  if (/^\/experiments\/?$/.test(path)) return { page: "list" };
  if (/^\/projects\/?$/.test(path)) return { page: "projects" };
  if (/^\/cluster\/?$/.test(path)) return { page: "cluster" };
  if (/^\/models\/?$/.test(path)) return { page: "models" };
  if (/^\/users\/?$/.test(path)) return { page: "users" };
  const token = LINK.exec(path)?.[1];
  if (token) return { page: "shared", token };
  const model = MODEL.exec(path)?.[1];
  if (model) return { page: "model", name: model };
  const numbers = (text: string | undefined) => (text ?? "").split(",").filter(Boolean).map(Number);
  const several = SEVERAL.exec(path);
  if (several) return { page: "compare", ids: [...new Set(numbers(several[1]))] };
  const one = TRIAL.exec(path);
  const own = TRIAL_TABS.find((name) => name === one?.[2]) ?? null;
  if (one && (own !== null || !one[2])) return { page: "trial", id: Number(one[1]), tab: own };
  const found = EXPERIMENT.exec(path);
  const tab = TABS.find((name) => name === found?.[2]) ?? null;
  if (!found || (found[2] && tab === null)) return { page: "unknown" };
  return { page: "experiment", id: Number(found[1]), tab, trials: numbers(found[3]) };
}

/** The choices of the address, behind a `?`, if `same` says that they are about the same thing. */
function keeping(same: (now: Route) => boolean): string {
  const now = parse(window.location.hash);
  const query = same(now) ? now.choices.toString() : "";
  return query && `?${query}`;
}

/** The address of a view; choices that were made about the same experiment are kept. */
export function address(id: number, tab: Tab | null = null, trials: number[] = []): string {
  const chosen = trials.length > 0 ? `/${trials.join(",")}` : "";
  const place = tab === null && chosen === "" ? "" : `/${tab ?? "curves"}${chosen}`;
  return `#/experiments/${id}${place}${keeping((now) => now.page === "experiment" && now.id === id)}`;
}

export function trialAddress(id: number, tab: TrialTab | null = null): string {
  return `#/trials/${id}${tab === null ? "" : `/${tab}`}${keeping((now) => now.page === "trial" && now.id === id)}`;
}

export const projectAddress = (name: string): string => `#/experiments?project=${encodeURIComponent(name)}`;

export const modelAddress = (name: string): string => `#/models/${name}`;

export function compareAddress(ids: number[]): string {
  return `#/compare/${ids.join(",")}${keeping((now) => now.page === "compare")}`;
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
    changed(); // it may have changed between the first drawing and now
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
