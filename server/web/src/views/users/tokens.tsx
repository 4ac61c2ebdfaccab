/** API tokens: of oneself, or of everybody for an administrator. */

import { get, remove } from "../../api";
import { Ask } from "../../dialog";
import { useLoaded } from "../../live";
import { Cell, Problem, Table, Time } from "../../parts";
import type { ApiToken } from "../../resources";

const TOKEN_HEADS = ["token", "user", "purpose", "created", "expires", "last used", ""];

interface OfUser extends ApiToken {
  user: string;
}

async function readTokens(users: string[]): Promise<OfUser[]> {
  const lists = await Promise.all(users.map((user) => get<{ tokens: ApiToken[] }>(`/users/${user}/tokens`)));
  return lists.flatMap((list, at) => list.tokens.map((token) => ({ ...token, user: users[at]! })));
}

export function Tokens({ users }: { users: string[] }) {
  const list = useLoaded("tokens", () => readTokens(users));
  return (
    <>
      <h2>Tokens</h2>
      {list.error && <Problem text={list.error} />}
      {list.value?.length === 0 && (
        <p class="muted">
          No tokens. <code>zerolab token create</code> creates one; a browser cannot.
        </p>
      )}
      {list.value !== null && list.value.length > 0 && (
        <Table head={TOKEN_HEADS.map((name) => <th key={name} aria-label={name || "actions"}>{name}</th>)}>
          {list.value.map((token) => (
            <TokenLine key={token.id} token={token} done={list.reload} />
          ))}
        </Table>
      )}
    </>
  );
}

function TokenLine({ token, done }: { token: OfUser; done: () => void }) {
  const act = () => remove(`/users/${token.user}/tokens/${token.id}`).then(done);
  const expired = token.expires_at !== null && Date.parse(token.expires_at) < Date.now();
  return (
    <tr>
      <Cell name="token" kind="figure">
        {token.id}
      </Cell>
      <Cell name="user">{token.user}</Cell>
      <Cell name="purpose">{token.name || "–"}</Cell>
      <Cell name="created" kind="figure">
        <Time at={token.created_at} />
      </Cell>
      <Cell name="expires" kind="figure">
        {token.expires_at === null ? "never" : expired ? <b class="warn">expired</b> : token.expires_at.slice(0, 10)}
      </Cell>
      <Cell name="last used" kind="figure">
        {token.last_used_at === null ? "never" : <Time at={token.last_used_at} />}
      </Cell>
      <Cell kind="acts">
        <Ask act={act} final title={`revoke token ${token.id} of ${token.user}?`} ask="Programs that use it and browsers that it signed in are refused at once.">
          revoke
        </Ask>
      </Cell>
    </tr>
  );
}
