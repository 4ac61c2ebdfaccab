"""Sign-in of the page with an OpenID Connect provider, such as Keycloak, Okta or Google."""
