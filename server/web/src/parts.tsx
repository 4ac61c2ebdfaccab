/** Small pieces that several views show. */

import type { ComponentChildren } from "preact";

import { ApiError, post } from "./api";

export function Badge({ state }: { state: string }) {
  return <span class={`badge ${state.toLowerCase().split("_")[0]}`}>{state.replaceAll("_", " ").toLowerCase()}</span>;
}

export function Progress({ value, state }: { value: number; state: string }) {
  const percent = Math.round(100 * Math.min(1, Math.max(0, value)));
  return (
    <span class="progress" title={`${percent} %`}>
      <progress class={state.toLowerCase()} max={100} value={percent} />
      <small>{percent} %</small>
    </span>
  );
}

export function Problem({ text }: { text: string }) {
  if (text === "login") {
    return (
      <div class="notice">
        <b>You are not signed in.</b> Run <code>zerolab open</code> in a terminal: it prints a link that signs this
        browser in.
      </div>
    );
  }
  return (
    <div class="notice bad" role="alert">
      {text}
    </div>
  );
}

export function Action({ path, children, done, ask }: { path: string; children: ComponentChildren; done: () => void; ask?: string }) {
  const act = () => {
    if (ask && !window.confirm(ask)) return;
    post(path)
      .then(done)
      .catch((problem: ApiError) => window.alert(problem.message));
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
