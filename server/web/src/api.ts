/** Calls of the public REST API, and nothing else: the page needs no other routes. */

import type { ErrorAnswer, Num } from "./resources";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

async function ask(method: string, path: string, body?: unknown): Promise<Response> {
  const headers: Record<string, string> = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const sent = body === undefined ? null : JSON.stringify(body);
  const answer = await fetch(path.startsWith("/login") ? path : `/api/v1${path}`, { method, headers, body: sent });
  if (!answer.ok) {
    const body: Partial<ErrorAnswer> | null = await answer.json().catch(() => null);
    throw new ApiError(answer.status, body?.error?.message ?? `${answer.status} ${answer.statusText}`);
  }
  return answer;
}

async function call<T>(method: string, path: string, body?: unknown): Promise<T> {
  const answer = await ask(method, path, body);
  return answer.status === 204 ? (undefined as T) : ((await answer.json()) as T);
}

/** A file, as text. */
export const text = (path: string): Promise<string> => ask("GET", path).then((answer) => answer.text());
export const get = <T>(path: string): Promise<T> => call<T>("GET", path);
export const remove = (path: string): Promise<void> => call<void>("DELETE", path);
export const patch = <T>(path: string, body: unknown): Promise<T> => call<T>("PATCH", path, body);
export const put = (path: string, body?: unknown): Promise<void> => call<void>("PUT", path, body);
export const post = <T>(path: string, body?: unknown): Promise<T> => call<T>("POST", path, body);

/** Sign this browser in; the server sets a cookie. */
export const signIn = (user: string, password: string): Promise<void> => post<void>("/login", { user, password });

/** Open a share link in this browser; the server sets a cookie. */
export const openLink = (token: string): Promise<{ path: string }> => post("/login/share", { token });

/** Ways to sign in besides a password and a link; none where the server lacks the extension. */
export const signInMethods = (): Promise<{ oidc: string | null }> =>
  fetch("/login/methods").then((answer) => (answer.ok ? answer.json() : { oidc: null }));

/** All pages of a listing, at most `most` rows. */
export async function all<T>(path: string, key: string, most = 10_000): Promise<T[]> {
  const rows: T[] = [];
  const mark = path.includes("?") ? "&" : "?";
  let after: string | null = null;
  do {
    const cursor: string = after === null ? "" : `&after=${encodeURIComponent(after)}`;
    const page: Record<string, unknown> = await get(`${path}${mark}limit=1000${cursor}`);
    rows.push(...(page[key] as T[]));
    after = page.next_after as string | null;
  } while (after !== null && rows.length < most);
  return rows;
}

export const finite = (value: Num | null | undefined): number | null =>
  typeof value === "number" ? value : null;
