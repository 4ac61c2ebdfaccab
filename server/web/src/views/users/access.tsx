/** What the user of this browser may change; the server checks it again. */

import { type ComponentChildren, createContext } from "preact";
import { useContext } from "preact/hooks";

import { get } from "../../api";
import { useLoaded } from "../../live";
import type { Whoami } from "../../resources";

/** The user of this browser. */
export const useCaller = (): Whoami | null => useLoaded("whoami", () => get<Whoami>("/whoami")).value;

/** The user of this browser; null until the server has named it. */
export const Caller = createContext<Whoami | null>(null);

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
