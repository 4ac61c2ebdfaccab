/** What the user of this browser may change; the server checks it again. */

import { type ComponentChildren, createContext } from "preact";
import { useContext } from "preact/hooks";

import { get } from "../../api";
import { type Live, useLoaded } from "../../live";
import type { Whoami } from "../../resources";

/** The user of this browser, as the server names it. */
export const useWhoami = (): Live<Whoami> => useLoaded("whoami", () => get<Whoami>("/whoami"));

/** The user of this browser; null if the server has not named it. */
export const Caller = createContext<Whoami | null>(null);

export const useCaller = (): Whoami | null => useContext(Caller);

const ROLES = ["viewer", "member", "admin"];

/** Whether this browser has a share link and no user. */
export const useVisitor = (): boolean => useContext(Caller)?.kind === "share";

interface AllowedProps {
  /** Least role. */
  role?: "member" | "admin";
  /** Only this user and administrators may do it; null where nothing is owned. */
  owner?: string | null;
  children: ComponentChildren;
}

/** Buttons, disabled with a reason for users who may not use them. */
export function Allowed({ role = "member", owner = null, children }: AllowedProps) {
  const caller = useContext(Caller);
  if (caller?.kind === "share") return null;
  let denied = "";
  if (caller !== null && ROLES.indexOf(caller.role) < ROLES.indexOf(role)) denied = `needs the role ${role}; yours is ${caller.role}`;
  else if (caller !== null && owner !== null && caller.role !== "admin" && owner !== caller.user) denied = `belongs to ${owner}`;
  return (
    <fieldset class="allowed" disabled={denied !== ""} title={denied || undefined}>
      {children}
    </fieldset>
  );
}
