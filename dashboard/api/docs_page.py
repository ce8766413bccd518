"""`/docs`: the routes of this process as one HTML page, from its OpenAPI document."""

from fastapi import FastAPI, Request, Response

from machinery.openapi_page import docs_page


def add_docs(app: FastAPI, stylesheet: str) -> None:
    """Register the page. `stylesheet` is the path of its style sheet."""

    async def docs(request: Request) -> Response:
        """Return the documentation of all routes as a page."""
        text = docs_page(request.app.openapi(), stylesheet=stylesheet)
        return Response(text, media_type="text/html; charset=utf-8")

    app.add_api_route("/docs", docs, methods=["GET"])
