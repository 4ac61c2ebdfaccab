/** Small pieces that several views show. */

import type { ComponentChildren } from "preact";

import { post } from "./api";
import { LOGIN } from "./live";

export const ENDED = ["COMPLETED", "CANCELED", "ERROR"];

export function Badge({ state }: { state: string }) {
  return <span class={`badge ${state.toLowerCase().split("_")[0]}`}>{state.replaceAll("_", " ").toLowerCase()}</span>;
}

export function Progress({ value }: { value: number }) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, value)));
  return (
    <span class="progress">
      <progress max={100} value={percent} aria-label="progress" />
      <small>{percent} %</small>
    </span>
  );
}

export function Problem({ text }: { text: string }) {
  if (text === LOGIN) {
    return (
      <div class="notice" role="alert">
        <b>This browser is not signed in.</b> Run <code>zerolab open</code> in a terminal: it prints a link that signs
        it in, once.
      </div>
    );
  }
  const long = text.includes("\n");
  return (
    <div class="notice bad" role="alert">
      {long ? <pre tabIndex={0}>{text}</pre> : text}
    </div>
  );
}

interface Doing {
  path: string;
  children: ComponentChildren;
  done: () => void;
  /** Asked before it is done. */
  ask?: string;
}

export function Action({ path, children, done, ask }: Doing) {
  const act = () => {
    if (ask && !window.confirm(ask)) return;
    post(path).then(done, (problem: Error) => window.alert(problem.message));
  };
  return (
    <button type="button" onClick={act}>
      {children}
    </button>
  );
}

export function Facts({ rows }: { rows: [string, ComponentChildren][] }) {
  return (
    <dl class="facts">
      {rows.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

/** A table that scrolls sideways in a narrow window. */
export function Table({ head, children }: { head: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="table">
      <table class="rows">
        <thead>
          <tr>{head}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
