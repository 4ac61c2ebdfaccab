// An OpenID Connect provider for tests: any login is accepted, and names an account of ACCOUNTS.
import Provider from "oidc-provider";

const [port, callbacks, accounts] = process.argv.slice(2);
const known = JSON.parse(accounts);
const issuer = `http://127.0.0.1:${port}`;
const provider = new Provider(issuer, {
  clients: [{ client_id: "zerolab", client_secret: "s3cret-of-the-client", redirect_uris: callbacks.split(",") }],
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["preferred_username"] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...known[id] }) }),
});
provider.listen(Number(port), "127.0.0.1", () => console.log("ready"));
