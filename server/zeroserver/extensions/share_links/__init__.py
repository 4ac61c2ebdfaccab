"""Share links: experiments for readers without an account, until the links expire."""
